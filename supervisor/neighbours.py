"""What workers do to each other on one device, carried out: prefill turns passed on, neighbours told of each other.

Decides nothing: `turns.py` and `company.py` do. Owns the clock and the timer that they lack.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from supervisor import company, hardware, turns
from supervisor.protocol import Activity, AskTurn, GiveTurn, Grant, Message, Turn

log = logging.getLogger("neighbours")

FromWorker = Activity | AskTurn | GiveTurn


class NeighbourShell(Protocol):
    def send(self, identity: bytes, message: Message) -> bool: ...


class Neighbourhood:
    def __init__(self, shell: NeighbourShell, turn_s: float) -> None:
        self._shell = shell
        self._turn_s = turn_s
        self._turns = turns.Turns(turn_s)
        self._company = company.Company()
        self._cores = None if hardware.has_metal() else _cores()
        self._timer: asyncio.TimerHandle | None = None

    def join(self, worker: bytes) -> None:
        """It is ready to serve."""
        self._tell(self._turns.join(worker, time.monotonic()))

    def leave(self, worker: bytes) -> None:
        self._tell(self._turns.leave(worker, time.monotonic()))
        self._inform(self._company.leave(worker))

    def work(self, busy: Iterable[bytes]) -> None:
        """These workers have requests now, and no others."""
        self._inform(self._company.work(busy))

    def take(self, worker: bytes, message: FromWorker) -> None:
        match message:
            case Activity():
                self._inform(self._company.decodes(worker, message.decoding))
            case AskTurn():
                self._tell(self._turns.ask(worker, message.priority, time.monotonic()))
            case GiveTurn():
                self._tell(self._turns.give(worker, message.turn, time.monotonic()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._tell(self._turns.tick(time.monotonic()))

    def _tell(self, tells: Iterable[turns.Tell]) -> None:
        for tell in tells:
            if tell.state == "lost":
                log.warning("%s kept its prefill turn for %g s; others go on", tell.worker.decode(), self._turn_s)
            self._shell.send(tell.worker, Turn(turn=tell.turn, state=tell.state))
        self.close()
        if (deadline := self._turns.next_deadline()) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._tick)

    def _inform(self, news: Mapping[bytes, company.Neighbours]) -> None:
        for worker, around in news.items():
            # Measured on 2 cores, a prompt beside a stream: with 1 thread each a fifth less time and CPU than with 2.
            threads = None if self._cores is None else max(1, self._cores // around.computing)
            grant = Grant(neighbours_busy=around.busy, neighbours_decoding=around.decoding, blas_threads=threads)
            self._shell.send(worker, grant)


def _cores() -> int:
    """Those that this process may use, and its workers with it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
