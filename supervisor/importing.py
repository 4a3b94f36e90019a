"""Imports of GGUF files: each runs in a process of its own and is charged to the budget like a model that loads.

To the slot machine an import is a slot named `import:NAME` whose worker never gets ready: its progress lines become the
worker's progress, its end becomes an unload.
"""

import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import msgspec

from supervisor import budget
from supervisor import slot_events as slots
from supervisor.fleet import TAIL_LINES
from supervisor.logs import LogBook
from supervisor.process import Child, Exit
from supervisor.protocol import Code
from supervisor.roster import Roster

log = logging.getLogger("import")

PREFIX = "import:"
FLOAT32_GROWTH = 8.0
"""A 4-bit GGUF weight takes 4.5 bits or so, a float32 one 32; the check holds the result once."""


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

    def happened(self, event: slots.SlotEvent) -> None: ...
    def book(self, name: str) -> LogBook: ...
    def change_roster(self, roster: Roster) -> None: ...


def is_import(slot: str) -> bool:
    return slot.startswith(PREFIX)


class Importer:
    def __init__(self, shell: ImportShell) -> None:
        self._shell = shell
        self._imports: dict[str, Import] = {}

    def running(self, name: str) -> bool:
        return PREFIX + name in self._imports

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
        need_bytes = int(order.source.stat().st_size * growth) + budget.RUNTIME_BYTES
        cost = slots.ModelCost(order.slot, need_bytes)
        self._imports[order.slot] = Import(order, cost, on_note, on_end)
        self._change_costs()
        self._shell.happened(slots.LoadRequested(order.slot, call))

    def refused(self, slot: str, code: str, message: str) -> None:
        """The machine gave up on it; an error that its process reported itself says more.

        An import that is done was "unloaded" by ourselves; its process has only to leave.
        """
        job = self._imports.get(slot)
        if job is not None and job.result is None:
            self._end(job, code if job.error is None else job.code, job.error or message)

    # Effects

    def spawn(self, slot: str, gen: int) -> None:
        job, order = self._imports[slot], self._imports[slot].order
        job.gen = gen
        try:
            job.child = Child(
                [sys.executable, "-P", "-m", "worker.gguf_import"],
                self._shell.book(slot),
                lambda how: self._exited(job, how),
                argv=lambda lifeline: [
                    *("--source", str(order.source), "--models-dir", str(order.models_dir)),
                    *("--name", order.name, "--dtype", order.dtype, "--lifeline-fd", str(lifeline)),
                ],
                on_output=lambda data: self._output(job, data),
            )
        except OSError as e:
            self._shell.happened(slots.WorkerExited(slot, gen, 71, None, f"no process could be started: {e}"))
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
        if job.order.slot in self._imports:
            lost = f"the import ended before it was done ({how})\n{tail}".rstrip()
            self._end(job, job.code, None if job.result else job.error or lost)

    def _end(self, job: Import, code: str, error: str | None) -> None:
        del self._imports[job.order.slot]
        job.code, job.error = code, error
        self._change_costs()
        job.on_end(job)

    def _change_costs(self) -> None:
        costs = tuple(job.cost for job in self._imports.values())
        self._shell.change_roster(replace(self._shell.roster, extra_costs=costs))
