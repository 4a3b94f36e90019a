"""How memory is measured, and which processes are looked at when."""

import asyncio
import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.meter import RusageInfo, footprint_bytes, pss_bytes
from supervisor.meters import SLACK_BYTES, Meters
from supervisor.protocol import EventKind
from supervisor.slot_events import SlotEvent, WorkerMeasured

ROLLUP = """\
55d0c0000000-7ffd1c3f0000 ---p 00000000 00:00 0                          [rollup]
Rss:              284928 kB
Pss:              270100 kB
Pss_Anon:         250000 kB
"""


def test_the_layout_of_rusage_info_is_that_of_the_system_header() -> None:
    """16 bytes of UUID, then ten 64-bit counters, of which phys_footprint is the eighth."""
    assert ctypes.sizeof(RusageInfo) == 96
    assert RusageInfo.ri_resident_size.offset == 64
    assert RusageInfo.ri_phys_footprint.offset == 72
    assert RusageInfo.ri_phys_footprint.size == 8


def test_pss_is_read_from_the_rollup() -> None:
    assert pss_bytes(ROLLUP) == 270100 * 1024
    assert pss_bytes("") is None


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no meter for this system")
def test_a_process_that_takes_memory_measures_more() -> None:
    before = footprint_bytes(os.getpid())
    ballast = bytearray(os.urandom(1 << 16) * 512)
    after = footprint_bytes(os.getpid())
    assert before and after and len(ballast) * 0.9 < after - before < len(ballast) * 2


def test_a_process_that_is_gone_has_no_reading() -> None:
    assert footprint_bytes(2**22 + 1) is None


@dataclass
class Stand:
    """A server with workers as told; `read` counts who was looked at."""

    loaded: Any
    sizes: dict[int, int]
    progress: int = 0
    looked_at: list[int] = field(default_factory=list)
    events: list[SlotEvent] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def fleet(self) -> Any:
        beat = SimpleNamespace(progress=self.progress)
        worker = SimpleNamespace(model="a", gen=3, child=SimpleNamespace(pid=50), ready=object(), beat=beat)
        loading = SimpleNamespace(model="b", gen=1, child=SimpleNamespace(pid=51), ready=None, beat=None)
        return SimpleNamespace(workers=lambda: [worker, loading] if 50 in self.sizes else [loading])

    importer = SimpleNamespace(processes=lambda: [("import:c", 52)])
    staff = SimpleNamespace(status=lambda: [SimpleNamespace(pid=60), SimpleNamespace(pid=None)])

    def read(self, pid: int) -> int | None:
        self.looked_at.append(pid)
        return self.sizes.get(pid)

    def happened(self, event: SlotEvent) -> None:
        self.events.append(event)

    def publish(self, kind: EventKind, data: dict[str, object]) -> None:
        self.told.append(f"{kind} {data}")

    def publish_status(self, model: str) -> None:
        self.told.append(model)


def stand(**sizes: int) -> Any:
    return Stand(None, {int(name[1:]): size for name, size in sizes.items()})


class Rounds:
    """The memory settings of meters that make no pause, and how many rounds they have made."""

    def __init__(self) -> None:
        self.made = 0

    @property
    def measure_s(self) -> float:
        self.made += 1
        return 0.0


async def make_rounds(server: Stand, meters: Meters, count: int = 1) -> None:
    rounds = Rounds()
    server.loaded = SimpleNamespace(settings=SimpleNamespace(memory=rounds))
    task = asyncio.create_task(meters.keep())
    async with asyncio.timeout(25):
        while rounds.made < count:
            await asyncio.sleep(0.001)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_an_idle_worker_is_read_once_and_a_busy_one_again() -> None:
    server = stand(_50=1000, _60=10)
    meters = Meters(server, server.read, *[lambda pid: server.sizes.get(pid, 0)] * 2)
    await make_rounds(server, meters, 3)
    assert server.looked_at.count(50) == 1 and 51 not in server.looked_at
    assert server.events == [WorkerMeasured("a", 3, 1000)]
    assert server.told == ["a", "server {'measured_bytes': 1010}"]
    server.progress, server.sizes[50] = 1, 1005
    await make_rounds(server, meters)
    assert server.looked_at.count(50) == 1, "half a percent is not worth a walk through its pages"
    assert len(server.events) == 1 and len(server.told) == 2
    server.progress, server.sizes[50] = 2, 2000
    await make_rounds(server, meters)
    assert server.told[2:] == ["a", "server {'measured_bytes': 2010}"]
    assert meters.tree_bytes == 2010


async def test_a_busy_worker_is_read_again_when_pages_of_files_changed() -> None:
    server = stand(_50=1 << 30, _60=10)
    cheap = {"private": 600 << 20, "resident": 900 << 20}
    meters = Meters(server, server.read, lambda _: cheap["private"], lambda _: cheap["resident"])
    await make_rounds(server, meters)
    server.progress, cheap["resident"] = 1, cheap["resident"] + SLACK_BYTES
    await make_rounds(server, meters)
    assert server.looked_at.count(50) == 1
    cheap["resident"] += 1
    await make_rounds(server, meters)
    assert server.looked_at.count(50) == 2


async def test_what_a_busy_worker_takes_follows_its_private_pages_without_another_walk() -> None:
    server = stand(_50=1 << 30, _60=10)
    private = 600 << 20
    meters = Meters(
        server, server.read, lambda pid: private if pid == 50 else 5, lambda pid: private + (300 << 20) if pid == 50 else 5
    )
    await make_rounds(server, meters)
    server.progress, private = 1, private + SLACK_BYTES
    await make_rounds(server, meters)
    assert server.events == [WorkerMeasured("a", 3, 1 << 30)], "so little is no change"
    private += 1
    await make_rounds(server, meters)
    private -= 2 * SLACK_BYTES
    server.progress = 2
    await make_rounds(server, meters)
    grown, shrunk = (1 << 30) + SLACK_BYTES + 1, (1 << 30) - SLACK_BYTES + 1
    assert server.events[1:] == [WorkerMeasured("a", 3, size) for size in (grown, shrunk)]
    assert meters.tree_bytes == shrunk + 10 and server.looked_at.count(50) == 1


async def test_a_worker_that_has_just_died_is_not_one_that_takes_nothing() -> None:
    """Where private pages are all that is cheap to know nothing else tells the two apart."""
    server = stand(_50=1 << 30, _60=10)
    there = [True]
    meters = Meters(server, lambda pid: server.sizes.get(pid) if there[0] else None, *[lambda _: there[0] * (1 << 30)] * 2)
    await make_rounds(server, meters)
    server.progress, there[0] = 1, False
    await make_rounds(server, meters)
    assert server.events == [WorkerMeasured("a", 3, 1 << 30)]


async def test_a_worker_that_grew_or_shrank_while_it_was_read_is_read_again_and_not_added_to() -> None:
    """Else what it had for a moment would count twice when it has it again."""
    server = stand(_50=3 << 30, _60=10)
    private = [2 << 30]

    def read(pid: int) -> int | None:
        if pid == 50 and server.looked_at.count(50) == 0:
            private[0] = 1 << 30
        return server.read(pid)

    meters = Meters(server, read, *[lambda pid: private[0] if pid == 50 else 5] * 2)
    await make_rounds(server, meters)
    server.progress, private[0] = 1, 2 << 30
    await make_rounds(server, meters)
    assert server.events == [WorkerMeasured("a", 3, 3 << 30)] * 2 and server.looked_at.count(50) == 2
    server.progress, private[0] = 2, 1 << 30
    await make_rounds(server, meters)
    assert server.events[2:] == [WorkerMeasured("a", 3, 2 << 30)] and server.looked_at.count(50) == 2


async def test_the_servers_own_processes_are_read_again_only_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.meters.OWN_EVERY", 1)
    server = stand(_60=100 << 20)
    private = {60: 90 << 20}
    meters = Meters(server, server.read, lambda pid: private.get(pid, 0), lambda pid: private.get(pid, 0))
    await make_rounds(server, meters, 3)
    assert server.looked_at.count(60) == 1
    private[60] += 20 << 20
    await make_rounds(server, meters, 2)
    assert meters.tree_bytes == 120 << 20 and server.looked_at.count(60) == 1
    monkeypatch.setattr("supervisor.meters.STALE_S", 0.0)
    await make_rounds(server, meters)
    assert server.looked_at.count(60) >= 2


async def test_a_busy_worker_is_read_again_now_and_then_though_nothing_seems_to_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = stand(_50=1000, _60=10)
    meters = Meters(server, server.read, lambda _: 700, lambda _: 900)
    await make_rounds(server, meters)
    server.progress = 1
    monkeypatch.setattr("supervisor.meters.STALE_S", 0.0)
    await make_rounds(server, meters)
    assert server.looked_at.count(50) == 2


async def test_a_meter_that_fails_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    server = stand(_50=1000, _60=10)
    fails = iter([True])

    def read(pid: int) -> int | None:
        if next(fails, False):
            raise AttributeError("no such call in this system's library")
        return server.read(pid)

    await make_rounds(server, Meters(server, read), 2)
    assert server.events == [WorkerMeasured("a", 3, 1000)] and "memory could not be measured" in caplog.text


async def test_a_worker_that_is_gone_counts_no_more() -> None:
    server = stand(_50=1000, _60=10)
    meters = Meters(server, server.read)
    await make_rounds(server, meters)
    del server.sizes[50]
    await make_rounds(server, meters)
    assert meters.tree_bytes == 10


async def test_the_tree_of_the_moment_has_every_process_once_and_what_changed_since_it_was_measured() -> None:
    server = stand(_50=1000, _60=10)
    private = {50: 700, 51: 90, 52: 40, 60: 5}
    meters = Meters(server, server.read, lambda pid: private.get(pid, 0))
    await make_rounds(server, meters)
    now = meters.tree_now()
    assert now.workers == {"a": 700, "b": 90, "import:c": 40}, "one that loads and an import are of the tree, too"
    assert (now.tree_bytes, now.own_bytes) == (1000 + 90 + 40 + 10, 10)
    assert now.private_bytes == sum(size for pid, size in private.items() if pid != os.getpid())
    private[50] = 1200
    assert meters.tree_now().tree_bytes == now.tree_bytes + 500, "an idle worker that is not measured again"
    del private[52]
    assert meters.tree_now().tree_bytes == now.tree_bytes + 500 - 40
