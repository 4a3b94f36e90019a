"""Reads the meters: the workers that have done something since the last look, the server's own processes now and then.

What a reading means for the budget is the slot machine's business. A reading walks the page tables of the whole model, so only
new processes are read at once. Idle workers are not read again, as their memory does not grow; of busy ones the change of their
private pages, which is cheap to know, is added to what was read; they are read again when pages of files have come or gone.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
"""A process whose pages have changed by less has not changed."""
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


def _slack_bytes(size_bytes: int) -> float:
    return min(SLACK_BYTES, TOLD_SHARE * size_bytes)


@dataclass(frozen=True, slots=True)
class Reading:
    size_bytes: int
    private_bytes: int
    of_files_bytes: int
    """Resident, and not private: with the private ones what is cheap to know, to tell how much has changed since."""
    walked_at: float
    """When the size was read last; since then it follows the private bytes. Long ago if it does not belong to them."""

    def size_bytes_with(self, private_bytes: int) -> int:
        """What the process takes when so much of it is private now."""
        return max(0, self.size_bytes + private_bytes - self.private_bytes)


@dataclass(slots=True)
class Measured:
    """A worker."""

    reading: Reading
    progress: int
    """The worker's counter at that time."""
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
        self._workers: dict[int, Measured] = {}
        self._own: dict[int, Reading] = {}
        self._told_bytes = 0

    @property
    def tree_bytes(self) -> int:
        """All processes of the server, as read last."""
        return self._own_bytes + sum(worker.reading.size_bytes for worker in self._workers.values())

    @property
    def _own_bytes(self) -> int:
        return sum(reading.size_bytes for reading in self._own.values())

    def tree_now(self) -> TreeNow:
        workers: dict[str, int] = {}
        workers_bytes = 0
        fleet = [(worker.model, worker.child.pid) for worker in self._shell.fleet.workers()]
        for model, pid in [*fleet, *self._shell.importer.processes()]:
            known = self._workers.get(pid)
            workers[model] = private = self._read_private(pid)
            workers_bytes += private if known is None else known.reading.size_bytes_with(private)
        own_bytes = self._own_bytes
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
        looked = [(pid, await self._look(pid, self._own.get(pid))) for pid in pids]
        self._own = {pid: reading for pid, reading in looked if reading is not None}

    async def _look_at_workers(self) -> None:
        workers = [worker for worker in self._shell.fleet.workers() if worker.ready is not None]
        self._workers = {w.child.pid: self._workers[w.child.pid] for w in workers if w.child.pid in self._workers}
        for worker in workers:
            progress = worker.beat.progress if worker.beat else -1
            known = self._workers.get(worker.child.pid)
            if known is None or known.progress != progress:
                reading = await self._look(worker.child.pid, known.reading if known else None)
                if reading is not None and (known is None or reading is not known.reading):
                    self._take(worker, reading, progress)

    async def _look(self, pid: int, known: Reading | None) -> Reading | None:
        """What that process takes now: `known` itself if that has hardly changed, None if there is no such process."""
        private_bytes, of_files_bytes = self._cheap(pid)
        is_there = private_bytes > 0
        if known is not None and is_there and time.monotonic() - known.walked_at <= STALE_S:
            slack_bytes = _slack_bytes(known.size_bytes)
            if abs(of_files_bytes - known.of_files_bytes) <= slack_bytes:
                if abs(private_bytes - known.private_bytes) <= slack_bytes:
                    return known
                return replace(known, size_bytes=known.size_bytes_with(private_bytes), private_bytes=private_bytes)
        size_bytes = await asyncio.to_thread(self._read, pid)
        if size_bytes is None:
            return None
        after_bytes, of_files_bytes = self._cheap(pid)
        has_moved = abs(after_bytes - private_bytes) > _slack_bytes(size_bytes)  # meanwhile: what follows would be off by that
        return Reading(size_bytes, after_bytes, of_files_bytes, walked_at=-math.inf if has_moved else time.monotonic())

    def _cheap(self, pid: int) -> tuple[int, int]:
        private_bytes = self._read_private(pid)
        return private_bytes, self._read_resident(pid) - private_bytes

    def _take(self, worker: WorkerProcess, reading: Reading, progress: int) -> None:
        measured = self._workers.setdefault(worker.child.pid, Measured(reading, progress))
        measured.reading, measured.progress = reading, progress
        self._shell.happened(slots.WorkerMeasured(worker.model, worker.gen, reading.size_bytes))
        if differs(reading.size_bytes, measured.told_bytes):
            measured.told_bytes = reading.size_bytes
            self._shell.publish_status(worker.model)
