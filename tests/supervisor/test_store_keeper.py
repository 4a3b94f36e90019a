"""The keeper between workers and janitor: who is granted what, what is ordered and answered, what is warned of and when."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.credits import RESERVE_BYTES, STARTS
from supervisor.logs import LogBook
from supervisor.paths import paths_of
from supervisor.protocol import Assign, Beat, CacheGrant, Grant, Ready
from supervisor.settings import CacheSettings, Settings
from supervisor.settings_values import size
from supervisor.store_keeper import StoreKeeper
from supervisor.store_limits import store_limits

MIB = 1 << 20
CAP = 1000 * MIB
READY = Ready(
    context=1, weights_bytes=1, kv_bytes_per_token=1, peak_bytes=1, max_inflight=1, load_s=1, cache_namespace="f" * 64,
    cache_layout="1" * 64,
)  # fmt: skip
ASSIGN = Assign(kind="text", gen=1, data_endpoints=[], cache=CacheGrant(dir="/cache"))


class Janitor:
    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.deaf = False

    def tell(self, line: bytes) -> bool:
        if not self.deaf:
            self.orders.append(json.loads(line))
        return not self.deaf


class World:
    """The supervisor around the keeper, as far as it looks."""

    def __init__(self, tmp_path: Path) -> None:
        settings = Settings(cache=CacheSettings(ssd_cache_max_size=size("1000MB")))
        self.loaded: Any = SimpleNamespace(settings=settings, home=tmp_path)
        self.paths = paths_of(tmp_path, settings)
        self.workers: list[Any] = []
        self.fleet: Any = SimpleNamespace(workers=lambda: self.workers)
        self.janitor = Janitor()
        self.staff: Any = SimpleNamespace(attendants={"janitor": self.janitor})
        self.sent: list[tuple[bytes, Any]] = []
        self.published: list[dict[str, object]] = []
        self._book = LogBook("janitor", tmp_path)
        self.keeper = StoreKeeper(self)

    def send(self, identity: bytes, message: Any) -> bool:
        self.sent.append((identity, message))
        return True

    def book(self, name: str) -> LogBook:
        return self._book

    def publish(self, kind: object, data: dict[str, object]) -> None:
        self.published.append(data)

    def all_warnings(self) -> list[str]:
        return self.keeper.warnings()

    # What a test does

    def worker(self, pid: int = 1, **beat: Any) -> Any:
        child = SimpleNamespace(pid=pid)
        found: Any = SimpleNamespace(model=f"m{pid}", identity=b"w.0.1.0", child=child, ready=READY, beat=None, stopping=False)
        if beat:
            self.beat(found, **beat)
        self.workers.append(found)
        return found

    @staticmethod
    def beat(worker: Any, *, settled: int = 0, trouble: str | None = None) -> None:
        worker.beat = Beat(
            seq=1, progress=1, cache={"settled_bytes": settled}, cache_trouble=trouble, store_written_bytes=settled
        )

    def assigned(self, worker: Any) -> int:
        credit = self.keeper.with_credit(ASSIGN, worker).cache.write_credit
        assert credit is not None
        return credit

    def said(self, **line: object) -> None:
        whole = {"event": "cache_pass", "id": None, "began": time.monotonic(), "state": "ok", "dry_run": False, "left_bytes": 0}
        whole |= {"free_bytes": 1 << 40, "deleted_files": {}, "deleted_bytes": 0, "failed_files": 0}
        self.keeper.janitor_said(json.dumps({**whole, **line}).encode() + b"\n")

    def granted(self) -> int:
        return sum(message.write_credit or 0 for _, message in self.sent if isinstance(message, Grant))

    async def turn(self) -> None:
        """One round of the keeper's task."""
        task = asyncio.create_task(self.keeper.keep())
        await asyncio.sleep(0)
        task.cancel()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_assignment_carries_credit_and_the_same_when_it_is_asked_for_again(world: World) -> None:
    world.said()
    worker = world.worker()
    first = world.assigned(worker)
    assert 0 < first < CAP
    assert world.assigned(worker) == first
    assert world.keeper.credits.available_bytes < CAP - first


def test_a_worker_without_a_place_on_disk_gets_no_account(world: World) -> None:
    worker = world.worker()
    ram_only = Assign(kind="text", gen=1, data_endpoints=[])
    assert world.keeper.with_credit(ram_only, worker) is ram_only
    assert world.keeper.status()["workers"][0]["credit_bytes"] is None  # type: ignore[index]


async def test_what_was_not_known_at_the_assignment_is_granted_later(world: World) -> None:
    worker = world.worker(settled=0)
    assert world.assigned(worker) == 0  # nobody has looked at the disk yet
    worker.ready = None
    world.said()
    await world.turn()
    assert world.granted() == 0  # it has no engine yet that could take it
    worker.ready = READY
    await world.turn()
    assert 0 < world.granted() < CAP


async def test_a_worker_that_runs_short_makes_the_janitor_look_once(world: World) -> None:
    world.said()
    worker = world.worker()
    world.beat(worker, settled=world.assigned(worker))
    world.said(left_bytes=900 * MIB)
    for _ in range(3):
        world.beat(worker, settled=world.keeper.credits.account("w.0.1.0/1").granted_bytes)  # type: ignore[union-attr]
        await world.turn()
    assert [order["do"] for order in world.janitor.orders] == ["pass"]
    world.said(id=world.janitor.orders[0]["id"], left_bytes=810 * MIB)
    before = world.granted()
    await world.turn()
    assert world.granted() > before


async def test_a_dead_workers_credit_comes_back_with_the_next_look(world: World) -> None:
    world.said()
    world.assigned(world.worker())
    before = world.keeper.credits.available_bytes
    world.workers.clear()
    await world.turn()
    assert world.keeper.credits.available_bytes == before
    world.said()
    assert world.keeper.credits.available_bytes == CAP - STARTS * RESERVE_BYTES


def test_an_order_is_answered_by_its_own_report_only(world: World) -> None:
    heard: list[Any] = []
    world.keeper.order({"do": "clear", "model": "m"}, heard.append)
    [order] = world.janitor.orders
    world.said(id="other")
    world.keeper.janitor_said(b"Traceback: this is no report\n")
    assert heard == []
    world.said(event="cache_clear", id=order["id"], deleted_files={"block": 2}, deleted_bytes=7)
    world.said(id=order["id"])
    assert len(heard) == 1 and heard[0]["deleted_bytes"] == 7
    assert (world.keeper.deleted.files, world.keeper.deleted.bytes) == (2, 7)
    assert any("no report" in line for line in world.book("").tail(10))


def test_a_report_may_arrive_in_pieces(world: World) -> None:
    line = json.dumps({"event": "cache_pass", "began": 1.0, "state": "ok", "left_bytes": 5, "free_bytes": 9}).encode() + b"\n"
    world.keeper.janitor_said(line[:20])
    world.keeper.janitor_said(line[20:])
    assert world.keeper.credits.disk_bytes == 5


def test_a_janitor_that_dies_or_is_not_there_answers_with_nothing(world: World) -> None:
    heard: list[Any] = []
    world.keeper.order({"do": "pass"}, heard.append)
    world.keeper.janitor_lost()
    world.janitor.deaf = True
    world.keeper.order({"do": "pass"}, heard.append)
    world.staff.attendants.clear()
    world.keeper.order({"do": "pass"}, heard.append)
    assert heard == [None, None, None]


def test_a_dry_run_frees_nothing(world: World) -> None:
    world.said(left_bytes=500, deleted_bytes=300, dry_run=True)
    assert (world.keeper.credits.disk_bytes, world.keeper.deleted.bytes) == (500, 0)


async def test_trouble_is_said_once_for_all_workers_and_once_when_it_is_over(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    workers = [world.worker(1, trouble="full: no space left"), world.worker(2, trouble="full: no space left")]
    for _ in range(3):
        await world.turn()
    [warning] = world.keeper.warnings()
    assert "by m1, m2" in warning and "full: no space left" in warning
    for worker in workers:
        world.beat(worker)
    await world.turn()
    assert world.keeper.warnings() == []
    assert [record.levelname for record in caplog.records if record.name == "store"] == ["WARNING", "INFO"]
    assert [data["warnings"] for data in world.published] == [[warning], []]


def test_a_foreign_directory_is_warned_of_before_any_worker_stumbles_over_it(world: World) -> None:
    assert world.keeper.warnings() == []
    world.said(state="not_ours", left_bytes=0)
    [warning] = world.keeper.warnings()
    assert "not_ours" in warning and str(world.paths.cache) in warning
    assert world.keeper.credits.available_bytes == 0


@pytest.mark.parametrize(
    ("cap", "high"), [("100GB", 90 * 1024 * MIB), ("4GB", 3584 * MIB), ("1000MB", 500 * MIB), ("2MB", MIB)]
)
def test_a_small_cap_leaves_writers_a_larger_part(tmp_path: Path, cap: str, high: int) -> None:
    """A tenth of it may not hold a single block, and a store that nothing new gets into is of no use."""
    settings = Settings(cache=CacheSettings(ssd_cache_max_size=size(cap)))
    limits = store_limits(settings, paths_of(tmp_path, settings))
    assert limits.high_bytes == high
