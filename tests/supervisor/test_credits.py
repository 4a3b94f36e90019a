"""Write credits: the cap of the block store holds whatever workers and janitor do, and in whatever order it becomes known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from supervisor.credits import CREDIT_MOST_BYTES, RESERVE_BYTES, STARTS, Credits, Limits, Look

MIB = 1 << 20
LIMITS = Limits(cap_bytes=1000 * MIB, high_bytes=900 * MIB, min_free_bytes=0)
ROOMY = 1 << 50
HELD = STARTS * RESERVE_BYTES


def opened(*workers: str, disk_bytes: int | None = 0, limits: Limits = LIMITS) -> Credits:
    credits = Credits(limits)
    credits.looked(Look(0.0, disk_bytes, ROOMY))
    for worker in workers:
        credits.open(worker)
    return credits


def test_nothing_is_granted_before_the_disk_was_looked_at() -> None:
    credits = Credits(LIMITS)
    credits.open("a")
    assert credits.top_up("a") == 0
    credits.looked(Look(1.0, 0, ROOMY))
    assert credits.top_up("a") > 0


def test_a_worker_that_starts_later_finds_credit_left() -> None:
    credits = opened("a")
    first = credits.top_up("a")
    credits.open("b")
    second = credits.top_up("b")
    assert 0 < second <= first < LIMITS.cap_bytes
    assert first + second + HELD <= LIMITS.cap_bytes


def test_there_is_room_for_the_namespaces_of_workers_that_start_when_all_is_granted() -> None:
    credits = opened("a")
    for now in range(1, 40):
        credits.settled("a", credits.top_up("a") and credits.account("a").granted_bytes, now=float(now))  # type: ignore[union-attr]
    granted = credits.account("a").granted_bytes  # type: ignore[union-attr]
    credits.open("b")
    credits.open("c")
    assert granted + 3 * RESERVE_BYTES <= LIMITS.cap_bytes


def test_no_worker_gets_more_than_it_can_use() -> None:
    credits = opened("a", limits=Limits(1 << 50, 1 << 49, 0))
    assert credits.top_up("a") == CREDIT_MOST_BYTES


def test_what_was_written_stays_charged_until_a_look_that_began_after_it() -> None:
    credits = opened("a")
    granted = credits.top_up("a")
    before = credits.available_bytes
    credits.settled("a", granted, now=5.0)
    credits.looked(Look(4.9, 0, ROOMY))
    assert credits.available_bytes == before
    credits.looked(Look(5.1, granted, ROOMY))
    assert credits.available_bytes == before  # moved from one column to the other
    credits.looked(Look(6.0, 0, ROOMY))
    assert credits.available_bytes == before + granted


def test_a_dead_workers_credit_stays_charged_until_a_look_that_began_after_its_death() -> None:
    credits = opened("a")
    granted = credits.top_up("a")
    credits.died("a", now=5.0)
    assert credits.top_up("a") == 0
    credits.looked(Look(4.9, 0, ROOMY))
    assert credits.available_bytes == LIMITS.cap_bytes - granted - HELD
    credits.looked(Look(5.0, granted, ROOMY))
    assert credits.available_bytes == LIMITS.cap_bytes - granted - HELD
    assert credits.account("a") is None


def test_a_late_report_of_an_older_look_changes_nothing() -> None:
    credits = opened("a", disk_bytes=500 * MIB)
    credits.looked(Look(-1.0, 0, ROOMY))
    assert credits.disk_bytes == 500 * MIB


def test_a_store_that_is_not_there_may_come_back_full() -> None:
    credits = opened("a", disk_bytes=None)
    assert credits.top_up("a") <= LIMITS.cap_bytes - LIMITS.high_bytes


def test_the_last_bytes_of_the_disk_are_nobodys() -> None:
    credits = Credits(Limits(1000 * MIB, 900 * MIB, min_free_bytes=100 * MIB))
    credits.open("a")
    credits.looked(Look(0.0, 0, free_bytes=130 * MIB))
    assert 0 < credits.top_up("a") <= 30 * MIB
    credits.looked(Look(1.0, 0, free_bytes=90 * MIB))
    assert credits.available_bytes == 0


def test_a_look_is_asked_for_only_by_who_runs_short_and_only_if_it_may_help() -> None:
    credits = opened("a", disk_bytes=900 * MIB)
    granted = credits.top_up("a")
    assert 0 < granted <= 100 * MIB
    assert not credits.needs_a_look
    credits.settled("a", granted // 3, now=1.0)
    assert not credits.needs_a_look
    credits.settled("a", granted, now=2.0)
    assert credits.needs_a_look
    credits.looked(Look(3.0, 900 * MIB + granted, ROOMY))
    assert not credits.needs_a_look  # nothing was written since: the next look would see the same


def test_it_is_topped_up_in_few_steps() -> None:
    credits = opened("a")
    granted = credits.top_up("a")
    credits.settled("a", granted // 3, now=1.0)
    assert credits.top_up("a") == 0
    credits.settled("a", granted * 3 // 4, now=2.0)
    assert credits.top_up("a") > granted // 10


@pytest.mark.parametrize("cap", [0, 1, RESERVE_BYTES])
def test_a_cap_too_small_for_anything_grants_nothing(cap: int) -> None:
    credits = opened("a", limits=Limits(cap, cap * 9 // 10, 0))
    assert credits.top_up("a") == 0


@dataclass
class Process:
    """A worker as it really is: what is in its hands, what it has settled, what it has not said yet."""

    hand: int = 0
    settled: int = 0
    overhead: int = RESERVE_BYTES
    alive: bool = True
    in_flight: list[int] = field(default_factory=list)
    unheard: list[int] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """Workers, a disk and a janitor, each telling the ledger late. Files are sizes; the janitor deletes the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.credits = Credits(LIMITS)
        self.processes: dict[str, Process] = {}
        self.count = 0
        self.files: dict[int, int] = {}
        self.names = 0
        self.walk: tuple[float, set[int]] | None = None

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def living(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.alive]

    def pick(self, data: st.DataObject) -> str | None:
        names = self.living()
        return data.draw(st.sampled_from(names)) if names else None

    def write_file(self, size: int) -> None:
        self.names += 1
        self.files[self.names] = size

    @rule()
    def start(self) -> None:
        if len(self.living()) >= 3:
            return
        self.count += 1
        name = f"w{self.count}"
        self.processes[name] = Process()
        self.credits.open(name)
        self.processes[name].hand += self.credits.top_up(name)

    @rule(data=st.data(), share=st.integers(1, 4))
    def begin_to_write(self, data: st.DataObject, share: int) -> None:
        if (name := self.pick(data)) and (cost := self.processes[name].hand // share):
            self.processes[name].hand -= cost
            self.processes[name].in_flight.append(cost)

    @rule(data=st.data(), saved=st.integers(0, 3))
    def end_of_a_write(self, data: st.DataObject, saved: int) -> None:
        """The file is at most as large as what was paid; 3: the write failed and left nothing."""
        name = self.pick(data)
        if name and self.processes[name].in_flight:
            cost = self.processes[name].in_flight.pop(0)
            self.processes[name].settled += cost
            if saved < 3:
                self.write_file(cost * (4 - saved) // 4)

    @rule(data=st.data())
    def open_the_namespace(self, data: st.DataObject) -> None:
        if name := self.pick(data):
            self.write_file(self.processes[name].overhead)
            self.processes[name].overhead = 0

    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        if name := self.pick(data):
            self.processes[name].unheard.append(self.processes[name].settled)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        name = self.pick(data)
        if name and self.processes[name].unheard:
            self.credits.settled(name, self.processes[name].unheard.pop(0), self.tick())

    @rule(data=st.data(), rounds=st.integers(1, 3))
    def a_busy_moment(self, data: st.DataObject, rounds: int) -> None:
        """One worker uses all it has, says so at once, and gets more."""
        if name := self.pick(data):
            process = self.processes[name]
            for _ in range(rounds):
                process.settled += process.hand
                self.write_file(process.hand)
                process.hand = 0
                self.credits.settled(name, process.settled, self.tick())
                process.hand += self.credits.top_up(name)

    @rule(data=st.data(), torn=st.booleans())
    def kill(self, data: st.DataObject, torn: bool) -> None:
        """What it was writing may lie on disk as a temporary."""
        if name := self.pick(data):
            process = self.processes[name]
            if torn and process.in_flight:
                self.write_file(process.in_flight[0])
            process.alive, process.hand, process.in_flight, process.overhead = False, 0, [], 0
            self.credits.died(name, self.tick())

    @rule()
    def janitor_begins(self) -> None:
        self.walk = (self.tick(), set(self.files))

    @rule(data=st.data(), deletes=st.booleans())
    def janitor_ends(self, data: st.DataObject, deletes: bool) -> None:
        """It may or may not have come across what appeared meanwhile."""
        if self.walk is None:
            return
        began, there = self.walk
        self.walk = None
        later = [name for name in self.files if name not in there]
        seen = {name for name in there if name in self.files}
        seen |= set(data.draw(st.lists(st.sampled_from(later), unique=True))) if later else set()
        disk = sum(self.files[name] for name in seen)
        if deletes and disk > LIMITS.high_bytes:
            for name in sorted(seen):
                if disk > LIMITS.high_bytes * 9 // 10:
                    disk -= self.files.pop(name)
        self.credits.looked(Look(began, disk, ROOMY))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        if name := self.pick(data):
            self.processes[name].hand += self.credits.top_up(name)

    @invariant()
    def the_cap_holds_even_if_every_credit_is_used_now(self) -> None:
        promised = sum(p.hand + sum(p.in_flight) + p.overhead for p in self.processes.values())
        assert sum(self.files.values()) + promised <= LIMITS.cap_bytes


World.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_the_cap_holds_in_any_world = World.TestCase
