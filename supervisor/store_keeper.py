"""The supervisor's side of the block store: grants write credits to workers, talks to the janitor, knows what is wrong.

Owns the ledger of credits. Touches no file of the store itself: the janitor looks and deletes, workers write.
"""

import asyncio
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from supervisor.credits import Credits, Look
from supervisor.fleet import Fleet, WorkerProcess
from supervisor.logs import LogBook
from supervisor.paths import Paths
from supervisor.protocol import Assign, EventKind, Grant, Message
from supervisor.settings_load import Loaded
from supervisor.staff import Staff
from supervisor.store_limits import store_limits

log = logging.getLogger("store")

JANITOR = "janitor"
UNSEEN = "not looked at yet"
TICK_S = 1.0
"""As often as workers tell what they have written."""
LOOK_LOST_S = 10.0
"""After this long without an answer a look is asked for again: 50,000 files take half a second."""
RATE_TICKS = 60
"""Write rates are over the last minute."""

Answer = Callable[[dict[str, object] | None], None]
"""Gets the janitor's report, or None when it died over the order."""


class KeeperShell(Protocol):
    """What the keeper needs of the supervisor around it."""

    loaded: Loaded
    paths: Paths
    fleet: Fleet
    staff: Staff

    def send(self, identity: bytes, message: Message) -> bool: ...
    def book(self, name: str) -> LogBook: ...
    def publish(self, kind: EventKind, data: dict[str, object]) -> None: ...
    def all_warnings(self) -> list[str]: ...


@dataclass(slots=True)
class _Writer:
    """A worker that writes to the store, and how much it had written when."""

    first_credit: int
    written: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=RATE_TICKS))

    @property
    def rate_bytes_s(self) -> float:
        if len(self.written) < 2:
            return 0.0
        (t0, w0), (t1, w1) = self.written[0], self.written[-1]
        return (w1 - w0) / (t1 - t0)


@dataclass(slots=True)
class Deleted:
    """By the janitor since the server started."""

    files: int = 0
    bytes: int = 0


class StoreKeeper:
    def __init__(self, shell: KeeperShell) -> None:
        self.credits = Credits(store_limits(shell.loaded.settings, shell.paths))
        self.state = UNSEEN
        self.deleted = Deleted()
        self._shell = shell
        self._writers: dict[str, _Writer] = {}
        self._orders: dict[str, Answer] = {}
        self._ids = itertools.count(1)
        self._asked_at: float | None = None
        self._rest = b""
        self._warned: list[str] = []

    async def keep(self) -> None:
        while True:
            try:
                self._tick(time.monotonic())
            except Exception:  # the task's boundary: without it no worker would get credit any more
                log.exception("keeping the store's books failed")
            await asyncio.sleep(TICK_S)

    # Workers

    def with_credit(self, assign: Assign, worker: WorkerProcess | None) -> Assign:
        """The assignment with what the worker may write before it is granted more; the same when asked for again."""
        if assign.cache.dir is None or worker is None:
            return assign
        name = _name(worker)
        if name not in self._writers:
            self.credits.open(name)
            self._writers[name] = _Writer(self.credits.top_up(name))
        cache = msgspec.structs.replace(assign.cache, write_credit=self._writers[name].first_credit)
        return msgspec.structs.replace(assign, cache=cache)

    def _tick(self, now: float) -> None:
        workers = {_name(worker): worker for worker in self._shell.fleet.workers()}
        for name in [name for name in self._writers if name not in workers]:
            del self._writers[name]
            self.credits.died(name, now)
        for name, writer in self._writers.items():
            self._settle(name, writer, workers[name], now)
        if self.credits.needs_a_look and (self._asked_at is None or now > self._asked_at + LOOK_LOST_S):
            self._asked_at = now
            self.order({"do": "pass"}, _nothing)
        self._warn()

    def _settle(self, name: str, writer: _Writer, worker: WorkerProcess, now: float) -> None:
        if worker.beat is not None:
            self.credits.settled(name, worker.beat.cache.get("settled_bytes", 0), now)
            writer.written.append((now, worker.beat.store_written_bytes))
        # Before it is ready a worker has nothing to write, and no engine that could take a grant.
        if worker.ready is not None and not worker.stopping and (more_bytes := self.credits.top_up(name)):
            self._shell.send(worker.identity, Grant(write_credit=more_bytes))

    # The janitor

    def order(self, order: dict[str, object], answer: Answer) -> None:
        """`answer` is called once, perhaps at once."""
        order_id = str(next(self._ids))
        janitor = self._shell.staff.attendants.get(JANITOR)
        if janitor is None or not janitor.tell(json.dumps({**order, "id": order_id}).encode() + b"\n"):
            answer(None)
            return
        self._orders[order_id] = answer

    def janitor_said(self, data: bytes) -> None:
        """Its standard output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = cast("object", json.loads(line))
            except ValueError:
                said = None
            if isinstance(said, dict):
                self._report(cast("dict[str, object]", said), line)
            else:
                self._shell.book(JANITOR).say(line.decode("utf-8", "replace"))

    def janitor_lost(self) -> None:
        self._rest, self._asked_at = b"", None
        orders, self._orders = self._orders, {}
        for answer in orders.values():
            answer(None)

    def _report(self, said: dict[str, object], line: bytes) -> None:
        state, began = said.get("state"), said.get("began")
        real = said.get("dry_run") is not True
        if isinstance(state, str) and isinstance(began, float):
            deleted_files = cast("dict[str, int]", said.get("deleted_files") or {})
            if state != self.state or deleted_files or said.get("failed_files"):
                self._shell.book(JANITOR).say(line.decode("utf-8", "replace"))
            self.state = state
            if real:
                self.deleted.files += sum(deleted_files.values())
                self.deleted.bytes += _number(said, "deleted_bytes")
            if said.get("event") == "cache_pass":
                self._asked_at = None
            self._looked(said, state, began, _number(said, "deleted_bytes") if real else 0)
        if answer := self._orders.pop(str(said.get("id")), None):
            answer(said)

    def _looked(self, said: dict[str, object], state: str, began: float, freed_bytes: int) -> None:
        """Of a directory that is foreign or cannot be listed there is nothing to learn; nobody writes there either."""
        if state == "ok":
            self.credits.looked(Look(began, _number(said, "left_bytes"), _number(said, "free_bytes") + freed_bytes))
        elif state == "missing":
            self.credits.looked(Look(began, None, 0))

    # What is wrong, and how it stands

    def warnings(self) -> list[str]:
        """One line per trouble, however many workers have it."""
        seen: dict[str, list[str]] = {}
        for worker in self._shell.fleet.workers():
            if worker.beat is not None and worker.beat.cache_trouble is not None:
                seen.setdefault(worker.beat.cache_trouble, []).append(worker.model)
        if not seen and self.state not in (UNSEEN, "ok", "missing"):
            seen[f"{self.state}: {self._shell.paths.cache}"] = []
        return [
            f"the prefix cache on disk is not in use{' by ' + ', '.join(sorted(models)) if models else ''}: {trouble}"
            for trouble, models in seen.items()
        ]

    def _warn(self) -> None:
        """Once when it begins, once when it is over."""
        warnings = self.warnings()
        if warnings == self._warned:
            return
        for warning in warnings:
            if warning not in self._warned:
                log.warning("%s", warning)
        if not warnings:
            log.info("the prefix cache on disk is in use again")
        self._warned = warnings
        self._shell.publish(EventKind.SERVER, {"warnings": self._shell.all_warnings()})

    def status(self) -> dict[str, object]:
        """For `omlxctl cache stats`: what only a running server knows."""
        limits = self.credits.limits
        return {
            "dir": str(self._shell.paths.cache),
            "state": self.state,
            "cap_bytes": limits.cap_bytes,
            "high_bytes": limits.high_bytes,
            "min_free_bytes": limits.min_free_bytes,
            "disk_bytes": self.credits.disk_bytes,
            "available_bytes": self.credits.available_bytes,
            "deleted_files": self.deleted.files,
            "deleted_bytes": self.deleted.bytes,
            "workers": [self._worker_status(worker) for worker in self._shell.fleet.workers() if worker.ready is not None],
        }

    def _worker_status(self, worker: WorkerProcess) -> dict[str, object]:
        account, writer = self.credits.account(_name(worker)), self._writers.get(_name(worker))
        ready, beat = worker.ready, worker.beat
        return {
            "model": worker.model,
            "namespace": _namespace_dir(ready.cache_namespace, ready.cache_layout) if ready else None,
            "granted_bytes": account.granted_bytes if account else None,
            "credit_bytes": account.hand_bytes if account else None,
            "write_rate_bytes_s": writer.rate_bytes_s if writer else 0.0,
            "written_bytes": beat.store_written_bytes if beat else 0,
            "hot_bytes": beat.hot_bytes if beat else 0,
            "trouble": beat.cache_trouble if beat else None,
            "counters": dict(beat.cache) if beat else {},
        }


def _name(worker: WorkerProcess) -> str:
    return f"{worker.identity.decode()}/{worker.child.pid}"


def _namespace_dir(fingerprint: str | None, layout: str | None) -> str | None:
    """As `cachestore.tree.namespace_dir` calls it."""
    return f"{fingerprint[:16]}-{layout[:16]}" if fingerprint and layout else None


def _number(said: dict[str, object], key: str) -> int:
    value = said.get(key)
    return value if isinstance(value, int) else 0


def _nothing(_: dict[str, object] | None) -> None:
    """A look's report is booked like any other."""
