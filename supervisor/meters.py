"""Reads the meters: the workers that have done something since the last look, the server's own processes now and then.

What a reading means for the budget is the slot machine's business. A reading walks the page tables of the whole model: idle
workers are not read again, as their memory does not grow, and busy ones only when cheap readings say that theirs has changed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from supervisor import slot_events as slots
from supervisor.fleet import Fleet, WorkerProcess
from supervisor.importing import Importer
from supervisor.machine_memory import private_bytes, resident_bytes
from supervisor.meter import footprint_bytes
from supervisor.protocol import EventKind
from supervisor.settings_load import Loaded
from supervisor.staff import Staff

log = logging.getLogger("meters")

OWN_EVERY = 6
"""The gateway and its like are small and do not change much."""
SLACK_BYTES = 8 << 20
"""A worker whose pages have changed by less has not changed."""
STALE_S = 60.0
"""Pages that it shares count for more when another process ends: no cheap reading tells."""
TOLD_SHARE = 0.01
"""A change below a hundredth is not worth an event."""


class MeterShell(Protocol):
    """What the meters need of the supervisor around them."""

    loaded: Loaded
    fleet: Fleet
    importer: Importer
    staff: Staff

    def happened(self, event: slots.SlotEvent) -> None: ...
    def publish(self, kind: EventKind, data: dict[str, object]) -> None: ...
    def publish_status(self, model: str) -> None: ...


def differs(size_bytes: int, told_bytes: int) -> bool:
    return abs(size_bytes - told_bytes) > TOLD_SHARE * told_bytes


@dataclass(slots=True)
class Reading:
    size_bytes: int
    progress: int
    """The worker's counter at that time."""
    private_bytes: int = 0
    """What was cheap to know, to tell how much it has changed since; so is the next."""
    resident_bytes: int = 0
    read_at: float = 0.0
    told_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TreeNow:
    """All processes of the server at one moment: the exact readings, and what has changed since by the cheap ones."""

    tree_bytes: int
    own_bytes: int
    private_bytes: int
    workers: Mapping[str, int]
    """Private bytes by slot, imports included."""


class Meters:
    def __init__(
        self,
        shell: MeterShell,
        read: Callable[[int], int | None] = footprint_bytes,
        read_private: Callable[[int], int] = private_bytes,
        read_resident: Callable[[int], int] = resident_bytes,
    ) -> None:
        self._shell = shell
        self._read = read
        self._read_private = read_private
        self._read_resident = read_resident
        self._workers: dict[int, Reading] = {}
        self._own: dict[int, int] = {}
        self._told_bytes = 0

    @property
    def tree_bytes(self) -> int:
        """All processes of the server, as read last."""
        return sum(self._own.values()) + sum(reading.size_bytes for reading in self._workers.values())

    def tree_now(self) -> TreeNow:
        workers: dict[str, int] = {}
        workers_bytes = 0
        fleet = [(worker.model, worker.child.pid) for worker in self._shell.fleet.workers()]
        for model, pid in [*fleet, *self._shell.importer.processes()]:
            known = self._workers.get(pid)
            workers[model] = private = self._read_private(pid)
            workers_bytes += private if known is None else max(0, known.size_bytes + private - known.private_bytes)
        own_bytes = sum(self._own.values())
        private_of_own = sum(self._read_private(pid) for pid in self._own)
        return TreeNow(own_bytes + workers_bytes, own_bytes, private_of_own + sum(workers.values()), workers)

    async def keep(self) -> None:
        rounds = 0
        while True:
            try:
                if rounds % OWN_EVERY == 0:
                    await self._look_at_own()
                await self._look_at_workers()
            except Exception:  # without readings charges stay what they are: no reason for the server to end
                log.exception("memory could not be measured")
            rounds += 1
            if differs(self.tree_bytes, self._told_bytes):
                self._told_bytes = self.tree_bytes
                self._shell.publish(EventKind.SERVER, {"measured_bytes": self.tree_bytes})
            await asyncio.sleep(self._shell.loaded.settings.memory.measure_s)

    async def _look_at_own(self) -> None:
        pids = [os.getpid(), *(child.pid for child in self._shell.staff.status() if child.pid)]
        readings = [(pid, await asyncio.to_thread(self._read, pid)) for pid in pids]
        self._own = {pid: size_bytes for pid, size_bytes in readings if size_bytes is not None}

    async def _look_at_workers(self) -> None:
        workers = [worker for worker in self._shell.fleet.workers() if worker.ready is not None]
        self._workers = {w.child.pid: self._workers[w.child.pid] for w in workers if w.child.pid in self._workers}
        for worker in workers:
            progress = worker.beat.progress if worker.beat else -1
            known = self._workers.get(worker.child.pid)
            if known is None or (known.progress != progress and self._has_changed(worker.child.pid, known)):
                size_bytes = await asyncio.to_thread(self._read, worker.child.pid)
                if size_bytes is not None:
                    self._take(worker, size_bytes, progress)

    def _has_changed(self, pid: int, known: Reading) -> bool:
        if time.monotonic() - known.read_at > STALE_S:
            return True
        changes = (self._read_private(pid) - known.private_bytes, self._read_resident(pid) - known.resident_bytes)
        return max(map(abs, changes)) > min(SLACK_BYTES, TOLD_SHARE * known.size_bytes)

    def _take(self, worker: WorkerProcess, size_bytes: int, progress: int) -> None:
        reading = self._workers.setdefault(worker.child.pid, Reading(size_bytes, progress))
        reading.size_bytes, reading.progress = size_bytes, progress
        reading.private_bytes = self._read_private(worker.child.pid)
        reading.resident_bytes = self._read_resident(worker.child.pid)
        reading.read_at = time.monotonic()
        self._shell.happened(slots.WorkerMeasured(worker.model, worker.gen, size_bytes))
        if differs(size_bytes, reading.told_bytes):
            reading.told_bytes = size_bytes
            self._shell.publish_status(worker.model)
