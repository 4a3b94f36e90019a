"""How other threads reach the engine thread: commands in order, and a wait that costs nothing while there is no work."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachestore.block import Block
from supervisor.protocol import Grant, Trim, Turn
from worker.job import Job


@dataclass(frozen=True, slots=True)
class Cancel:
    rid: str


@dataclass(frozen=True, slots=True)
class Halt:
    """End every request with an error, then the thread."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How much of that job's prompt is cached? `answer` gets the tokens in RAM and on disk, on the engine thread."""

    job: Job
    answer: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Warmed:
    """KV blocks read back from disk, in the order of their use."""

    blocks: Sequence[Block]


Command = Job | Cancel | Probe | Grant | Turn | Trim | Warmed | Halt


class Mailbox:
    def __init__(self) -> None:
        self._arrived = threading.Condition()  # its lock guards _commands
        self._commands: list[Command] = []

    def put(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, patience_s: float | None) -> list[Command]:
        """All commands since the last call; waits so long for one to come, None for ever."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._commands, patience_s)
            taken, self._commands = self._commands, []
            return taken
