"""Prefill turns: who is alone never waits, who contends takes turns, and whoever is stuck or dead stops nobody."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from supervisor.turns import LEVEL_TURNS, MAX_LEVEL, Tell, Turns

A, B, C = b"w.0", b"w.1", b"w.2"
PATIENCE_S = 10.0


def with_workers(*workers: bytes) -> tuple[Turns, int]:
    """The first one holds the turn of that number."""
    turns = Turns(PATIENCE_S)
    (first,) = turns.join(workers[0], 0.0)
    for worker in workers[1:]:
        assert turns.join(worker, 0.0) == []
    return turns, first.turn


def test_the_only_worker_has_the_turn_before_it_asks() -> None:
    assert [tell.state for tell in Turns(PATIENCE_S).join(A, 0.0)] == ["yours"]


def test_the_turn_changes_hands_when_its_holder_has_given_it_back_and_not_before() -> None:
    turns, first = with_workers(A, B)
    assert turns.ask(B, 0, 1.0) == [Tell(A, first, "wanted")]
    assert turns.holder == A
    (tell,) = turns.give(A, first, 2.0)
    assert (tell.worker, tell.state, turns.holder) == (B, "yours", B)
    assert turns.next_deadline() is None, "nobody waits: it keeps the turn for as long as it likes"


def test_two_that_keep_asking_take_turns_and_the_holder_always_hears_that_it_is_awaited() -> None:
    turns, turn = with_workers(A, B)
    turns.ask(B, 0, 0.0)
    holders: list[bytes] = []
    holder, other = A, B
    for now in range(6):
        mine, wanted = turns.ask(holder, 0, float(now)), []
        assert mine[:1] == [Tell(holder, turn, "yours")], "it holds it and need not have asked"
        passed = turns.give(holder, turn, float(now))
        wanted = turns.ask(holder, 0, float(now))
        assert [(tell.worker, tell.state) for tell in passed + wanted] == [(other, "yours"), (other, "wanted")]
        holders.append(other)
        turn, holder, other = passed[0].turn, other, holder
    assert holders == [B, A, B, A, B, A]


def test_a_holder_that_keeps_others_waiting_too_long_loses_its_turn_and_its_late_answer_counts_for_nothing() -> None:
    turns, first = with_workers(A, B)
    turns.ask(B, 0, 5.0)
    assert turns.next_deadline() == 5.0 + PATIENCE_S
    assert turns.tick(14.9) == []
    lost, given = turns.tick(15.0)
    assert (lost, given.worker, given.state) == (Tell(A, first, "lost"), B, "yours")
    assert turns.give(A, first, 16.0) == [] and turns.holder == B


def test_a_death_frees_the_turn_and_a_place_in_line() -> None:
    turns, _ = with_workers(A, B, C)
    turns.ask(B, 0, 0.0)
    turns.ask(C, 0, 0.0)
    turns.leave(B, 0.0)
    given = turns.leave(A, 0.0)
    assert [(tell.worker, tell.state) for tell in given] == [(C, "yours")]


def test_the_last_one_left_need_not_ask() -> None:
    turns, _ = with_workers(A, B)
    assert [(tell.worker, tell.state) for tell in turns.leave(A, 0.0)] == [(B, "yours")]


def test_a_more_urgent_prompt_goes_first() -> None:
    turns, first = with_workers(A, B, C)
    turns.ask(B, 0, 0.0)
    turns.ask(C, 1, 0.0)
    assert turns.give(A, first, 0.0)[0].worker == C


def test_one_that_waits_moves_up_when_it_has_something_more_urgent_and_never_back() -> None:
    turns, first = with_workers(A, B, C)
    turns.ask(B, 0, 0.0)
    turns.ask(C, -1, 0.0)
    turns.ask(C, 1, 0.0)
    turns.ask(C, -1, 0.0)
    assert turns.give(A, first, 0.0)[0].worker == C


class Workers(RuleBasedStateMachine):
    """Workers as they are: they ask when they have something to prefill, obey, hang, come back, die."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(PATIENCE_S)
        self.now = 0.0
        self.alive: dict[bytes, int | None] = {}  # and the turn each believes to have
        self.asked: set[bytes] = set()
        self.mail: dict[bytes, list[Tell]] = {}  # what a stopped one has not read
        self.stopped: set[bytes] = set()
        self.passed_over: dict[bytes, int] = {}
        self.numbers: set[int] = set()

    def hear(self, tells: list[Tell]) -> None:
        for tell in tells:
            if tell.state == "yours":
                assert self.turns.holder is not None
                for waiting in self.turns.waiting:
                    self.passed_over[waiting] = self.passed_over.get(waiting, 0) + 1
                self.passed_over.pop(tell.worker, None)
            self.mail[tell.worker].append(tell)
        for worker in list(self.alive):
            if worker not in self.stopped:
                self.read(worker)

    def read(self, worker: bytes) -> None:
        while self.mail[worker]:
            tell = self.mail[worker].pop(0)
            if tell.state == "yours":
                self.alive[worker] = tell.turn
                self.asked.discard(worker)
            elif tell.state == "lost" and self.alive[worker] == tell.turn:
                self.alive[worker] = None

    def pick(self, number: int, *, of: set[bytes] | None = None) -> bytes | None:
        among = sorted(set(self.alive) if of is None else of)
        return among[number % len(among)] if among else None

    @rule(name=st.integers(0, 4))
    def starts(self, name: int) -> None:
        worker = f"w.{name}.{len(self.numbers)}".encode()
        self.numbers.add(len(self.numbers))
        if len(self.alive) < 4:
            self.alive[worker], self.mail[worker] = None, []
            self.hear(self.turns.join(worker, self.now))

    @rule(number=st.integers(0, 9), priority=st.integers(-20, 20))
    def wants_to_prefill(self, number: int, priority: int) -> None:
        worker = self.pick(number)
        if worker is not None and worker not in self.stopped and self.alive[worker] is None:
            self.asked.add(worker)
            self.hear(self.turns.ask(worker, priority, self.now))

    @rule(number=st.integers(0, 9))
    def finishes_its_chunk(self, number: int) -> None:
        worker = self.pick(number)
        if worker is not None and worker not in self.stopped and (turn := self.alive[worker]) is not None:
            self.alive[worker] = None
            self.hear(self.turns.give(worker, turn, self.now))

    @rule(number=st.integers(0, 9))
    def is_stopped(self, number: int) -> None:
        if (worker := self.pick(number)) is not None:
            self.stopped.add(worker)

    @rule(number=st.integers(0, 9))
    def goes_on(self, number: int) -> None:
        if (worker := self.pick(number, of=self.stopped)) is not None:
            self.stopped.discard(worker)
            self.read(worker)

    @rule(number=st.integers(0, 9))
    def dies(self, number: int) -> None:
        if (worker := self.pick(number)) is not None:
            del self.alive[worker], self.mail[worker]
            for gone in (self.asked, self.stopped):
                gone.discard(worker)
            self.passed_over.pop(worker, None)
            self.hear(self.turns.leave(worker, self.now))

    @rule(seconds=st.sampled_from((0.1, 4.0, PATIENCE_S)))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.turns.next_deadline()) is not None and deadline <= until:
            assert deadline >= self.now
            self.now = deadline
            self.hear(self.turns.tick(self.now))
        self.now = until

    @invariant()
    def at_most_one_of_those_who_listen_believes_to_have_the_turn(self) -> None:
        holders = [worker for worker, turn in self.alive.items() if turn is not None and worker not in self.stopped]
        assert len(holders) <= 1
        assert not holders or self.turns.holder == holders[0]

    @invariant()
    def nobody_waits_for_a_turn_that_nobody_has(self) -> None:
        assert self.turns.holder in self.alive or not self.turns.waiting
        assert self.turns.next_deadline() is not None or not self.turns.waiting
        assert self.asked >= set(self.turns.waiting) - self.stopped

    @invariant()
    def nobody_is_passed_over_for_ever(self) -> None:
        assert max(self.passed_over.values(), default=0) <= 2 * MAX_LEVEL * LEVEL_TURNS + 4

    def teardown(self) -> None:
        """Whoever waits gets the turn, although those who are stopped never say another word."""
        for _ in range(200):
            if not self.turns.waiting:
                return
            self.time_passes(PATIENCE_S)
            for worker, turn in list(self.alive.items()):
                if turn is not None and worker not in self.stopped:
                    self.alive[worker] = None
                    self.hear(self.turns.give(worker, turn, self.now))
        raise AssertionError(f"still waiting: {self.turns.waiting}")


Workers.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTurnsInARandomWorld = Workers.TestCase
