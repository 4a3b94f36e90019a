"""Imports of GGUF files: each runs in a process of its own and is charged to the budget like a model that loads.

To the slot machine an import is a slot named `import:NAME` whose worker never gets ready: its progress lines become the
worker's progress, its end becomes an unload.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import msgspec

from supervisor import budget
from supervisor import slot_events as slots
from supervisor.census import Census
from supervisor.fleet import TAIL_LINES
from supervisor.leftovers import remove_leftovers
from supervisor.logs import LogBook
from supervisor.process import Child, Exit
from supervisor.protocol import Code
from supervisor.roster import Roster

log = logging.getLogger("import")

PREFIX = "import:"
FLOAT32_GROWTH = 8.0
"""A 4-bit GGUF weight takes 4.5 bits or so, a float32 one 32; the check holds the result once. What the file really grows to
is known only to who reads it, so this upper bound never asks for more than there is."""


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """What was asked for."""

    source: Path
    models_dir: Path
    name: str
    dtype: str

    @property
    def slot(self) -> str:
        return PREFIX + self.name


@dataclass(slots=True)
class Import:
    """One import and what became of it so far."""

    order: ImportOrder
    cost: slots.ModelCost
    on_note: Callable[[dict[str, object]], object]
    on_end: Callable[["Import"], None]
    gen: int = 0
    child: Child | None = None
    rest: bytes = b""
    result: dict[str, object] | None = None
    code: str = Code.INTERNAL
    error: str | None = None


class ImportShell(Protocol):
    roster: Roster
    budget_bytes: int
    census: Census

    def happened(self, event: slots.SlotEvent) -> None: ...
    def book(self, name: str) -> LogBook: ...
    def change_roster(self, roster: Roster) -> None: ...


def is_import(slot: str) -> bool:
    return slot.startswith(PREFIX)


class Importer:
    def __init__(self, shell: ImportShell) -> None:
        self._shell = shell
        self._imports: dict[str, Import] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def costs(self) -> tuple[slots.ModelCost, ...]:
        """What the imports that run or wait are charged."""
        return tuple(job.cost for job in self._imports.values())

    def running(self, name: str) -> bool:
        return PREFIX + name in self._imports

    def processes(self) -> list[tuple[str, int]]:
        """Slot and pid of those that run."""
        return [(slot, job.child.pid) for slot, job in self._imports.items() if job.child is not None]

    def begin(
        self,
        order: ImportOrder,
        *,
        call: str,
        on_note: Callable[[dict[str, object]], object],
        on_end: Callable[[Import], None],
    ) -> None:
        """Queues the import for memory; `on_end` is called once, with `result` or `error` set."""
        growth = FLOAT32_GROWTH if order.dtype in ("auto", "float32") else FLOAT32_GROWTH / 2
        size_bytes = order.source.stat().st_size
        least_bytes = size_bytes + budget.RUNTIME_BYTES
        need_bytes = int(size_bytes * growth) + budget.RUNTIME_BYTES
        cost = slots.ModelCost(order.slot, max(least_bytes, min(need_bytes, self._shell.budget_bytes)))
        self._imports[order.slot] = Import(order, cost, on_note, on_end)
        self._change_costs()
        self._shell.happened(slots.LoadRequested(order.slot, call))

    def refused(self, slot: str, code: str, message: str) -> None:
        """The machine gave up on it; an error that its process reported itself says more.

        With a process the import ends when that does, which the machine sees to. One that is done was "unloaded" by ourselves.
        """
        job = self._imports.get(slot)
        if job is None or job.result is not None:
            return
        if job.error is None:
            job.code, job.error = code, message
        if job.child is None:
            self._end(job)

    # Effects

    def spawn(self, slot: str, gen: int) -> None:
        job, order = self._imports[slot], self._imports[slot].order
        job.gen = gen
        try:
            job.child = Child(
                self._shell.book(slot),
                self._shell.census,
                lambda how: self._exited(job, how),
                command=lambda lifeline: [
                    *(sys.executable, "-P", "-m", "worker.gguf_import"),
                    *("--source", str(order.source), "--models-dir", str(order.models_dir)),
                    *("--name", order.name, "--dtype", order.dtype, "--lifeline-fd", str(lifeline)),
                ],
                on_output=lambda data: self._output(job, data),
            )
        except OSError as e:
            job.error = f"no process could be started: {e}"
            self._shell.happened(slots.WorkerExited(slot, gen, 71, None, job.error))
            self._end(job)
            return
        self._shell.happened(slots.WorkerHello(slot, gen))

    def ask_stop(self, effect: slots.AskStop) -> None:
        """An import that is done leaves by itself; another is told by signal."""
        job = self._imports.get(effect.model)
        if job is not None and job.result is None:
            self._signal(job, signal.SIGTERM)

    def terminate(self, slot: str, gen: int) -> None:
        if (job := self._imports.get(slot)) and job.gen == gen:
            self._signal(job, signal.SIGTERM)

    def kill(self, slot: str, gen: int) -> None:
        if (job := self._imports.get(slot)) and job.gen == gen and job.child:
            job.child.kill()

    def dump_stacks(self, slot: str, gen: int) -> None:
        if (job := self._imports.get(slot)) and job.gen == gen:
            self._signal(job, signal.SIGUSR1)

    def _signal(self, job: Import, number: int) -> None:
        if job.child is not None:
            job.child.signal(number)

    def _output(self, job: Import, data: bytes) -> None:
        *lines, job.rest = (job.rest + data).split(b"\n")
        for line in lines:
            try:
                said = msgspec.json.decode(line, type=dict[str, object])
            except msgspec.MsgspecError:
                log.warning("%s said something unreadable: %r", job.order.slot, line[:200])
                continue
            self._said(job, said)

    def _said(self, job: Import, said: dict[str, object]) -> None:
        slot, gen = job.order.slot, job.gen
        if isinstance(error := said.get("error"), dict):
            error = cast("dict[str, object]", error)
            job.code, job.error = str(error.get("code")), str(error.get("message"))
            self._shell.happened(slots.WorkerFault(slot, gen, job.code, job.error, False))
        elif said.get("stage") == "done":
            job.result = said
            self._shell.happened(slots.UnloadRequested(slot, None, True))
        else:
            job.on_note(said)
            done, total = (v if isinstance(v := said.get(k), int) else 0 for k in ("done", "total"))
            self._shell.happened(slots.WorkerProgress(slot, gen, str(said.get("stage")), done, total))

    def _exited(self, job: Import, how: Exit) -> None:
        tail = "\n".join(self._shell.book(job.order.slot).tail(TAIL_LINES))
        self._shell.happened(slots.WorkerExited(job.order.slot, job.gen, how.code, how.signal, tail))
        if job.result is None and job.error is None:
            job.error = f"the import ended before it was done ({how})\n{tail}".rstrip()
        self._end(job)

    def _end(self, job: Import) -> None:
        """To the machine it is over now; to who asked, when nothing is left of it."""
        del self._imports[job.order.slot]
        self._change_costs()
        task = asyncio.create_task(self._report(job))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _report(self, job: Import) -> None:
        if job.result is None:  # killed in the middle, it had no time to clean up
            await asyncio.to_thread(remove_leftovers, job.order.models_dir)
        job.on_end(job)

    def _change_costs(self) -> None:
        self._shell.change_roster(self._shell.roster)
