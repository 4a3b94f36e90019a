"""One request on its way through the supervisor and a worker; belongs to the link and outlives its HTTP handler.

Its life: counting (only for a model that is not loaded) → acquiring a lease → joining (the worker's data socket may not be up
yet) → running → done. This file holds the facts and what they imply; the link does the sending.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.errors import Failure
from gateway.inbox import Answered, Failed, Inbox, Output, Started
from gateway.request import GenerateRequest
from supervisor.protocol import Accepted, Code, Granted, Result, Row


class Stage(StrEnum):
    COUNTING = "counting"
    ACQUIRING = "acquiring"
    JOINING = "joining"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Exchange:
    name: str
    """The HTTP request's id and the index within it; each attempt's rid is derived from it."""
    index: int
    request: GenerateRequest
    inbox: Inbox
    stage: Stage = Stage.COUNTING
    attempt: int = 0
    granted: Granted | None = None
    deaf: bool = False
    """The handler has left: nothing more goes to the inbox, but the lease is held until the worker's last row."""
    has_content: bool = False
    prompt_tokens: int = 0
    tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    _next_seq: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def rid(self) -> str:
        return f"{self.name}.{self.attempt}"

    @property
    def count_rid(self) -> str:
        return f"{self.name}.count"

    def accept(self, accepted: Accepted) -> None:
        self.prompt_tokens = accepted.prompt_tokens
        if not self.deaf:
            self.inbox.put(Started(self.index, accepted))

    def output(self, row: Row) -> Failure | None:
        """Takes one row; returns why the answer is broken, if it is."""
        if row.seq != self._next_seq.get(row.choice, 0):
            return Failure(Code.INTERNAL, "The worker's output arrived incomplete.")
        self._next_seq[row.choice] = row.seq + 1
        self.tokens = row.tokens
        if row.usage is not None:
            self.prompt_tokens = row.usage.prompt_tokens
        if row.finish == "cancelled":
            return Failure(Code.CANCELLED, "The server cancelled this request.")
        if row.finish == "error":
            return Failure(Code.INTERNAL, "The worker failed while answering.")
        self.has_content = self.has_content or bool(row.pieces)
        if not self.deaf:
            self.inbox.put(Output(self.index, row))
        return None

    def answer(self, result: Result) -> None:
        if not self.deaf:
            self.inbox.put(Answered(self.index, result.data))

    def fail(self, failure: Failure) -> None:
        if not self.deaf:
            self.inbox.put(Failed(self.index, failure))

    def may_retry(self, failure: Failure) -> bool:
        """Once, only after a lost worker, and only while the client has seen nothing of the answer."""
        return failure.code == Code.WORKER_LOST and self.attempt == 0 and not self.has_content and not self.deaf

    def begin_again(self) -> None:
        self.attempt += 1
        self.granted = None
        self.tokens = 0
        self._next_seq.clear()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
