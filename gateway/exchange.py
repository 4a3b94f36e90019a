"""One request on its way through the supervisor and a worker; belongs to the link and outlives its HTTP handler.

Its life: counting (only for a model that is not loaded) → acquiring a lease → joining (the worker's data socket may not be up
yet) → running → done. This file holds the facts and what they imply; the link does the sending.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gateway.errors import Failure
from gateway.inbox import Answered, Failed, Inbox, Output, Restarted, Started
from gateway.records import Record
from gateway.request import GenerateRequest
from gateway.trace import Trace
from supervisor.protocol import Accepted, Code, Granted, Result, Row

RETRIED = (Code.WORKER_LOST, Code.GPU_FAULT)


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
    began_at: float
    """On the loop's clock."""
    record: Record
    """Of the HTTP request."""
    trace: Trace
    stage: Stage = Stage.COUNTING
    attempt: int = 0
    granted: Granted | None = None
    deaf: bool = False
    """The handler has left: nothing more goes to the inbox, but the lease is held until the worker's last row."""
    whole: bool = False
    """The client sees nothing of the answer before all of it is there."""
    has_content: bool = False
    prompt_tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    _next_seq: dict[int, int] = field(default_factory=dict[int, int])
    _tokens: dict[int, int] = field(default_factory=dict[int, int])
    _finished: set[int] = field(default_factory=set[int])

    @property
    def rid(self) -> str:
        return f"{self.name}.{self.attempt}"

    @property
    def count_rid(self) -> str:
        return f"{self.name}.count"

    @property
    def tokens(self) -> int:
        """Of all choices."""
        return sum(self._tokens.values())

    def left_ms(self, now: float) -> int | None:
        """Until the request's deadline, if it has one; never less than nothing."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0, round((self.began_at + deadline_s - now) * 1000))

    @property
    def is_over(self) -> bool:
        """Every choice has had its last row."""
        return len(self._finished) == self.request.choices

    def _index(self, choice: int) -> int:
        """Among all answers to the HTTP request, whose prompts all ask for equally many."""
        return self.index * self.request.choices + choice

    def accept(self, accepted: Accepted) -> None:
        self.prompt_tokens = accepted.prompt_tokens
        if not self.deaf:
            self.inbox.put(Started(self._index(0), accepted))

    def output(self, row: Row) -> Failure | None:
        """Takes one row; returns why the answer is broken, if it is."""
        if row.finish is not None:
            self._finished.add(row.choice)
        if row.seq != self._next_seq.get(row.choice, 0):
            return Failure(Code.INTERNAL, "The worker's output arrived incomplete.")
        self._next_seq[row.choice] = row.seq + 1
        self._tokens[row.choice] = row.tokens
        if row.usage is not None:
            self.prompt_tokens = row.usage.prompt_tokens
        if row.finish == "cancelled":
            return Failure(Code.CANCELLED, "The server cancelled this request.")
        if row.finish == "error":
            return Failure(Code.INTERNAL, "The worker failed while answering.")
        if not self.has_content:
            self.has_content = bool(row.pieces or row.logprobs or row.finish)
        if not self.deaf:
            self.inbox.put(Output(self._index(row.choice), _prompt_counted_once(row)))
        return None

    def answer(self, result: Result) -> None:
        if not self.deaf:
            self.inbox.put(Answered(self.index, result.data))

    def fail(self, failure: Failure) -> None:
        self.trace.note(failure.code)
        if not self.deaf:
            self.inbox.put(Failed(self.index, failure))

    def may_retry(self, failure: Failure) -> bool:
        """Once, only after a lost worker, and only while the client has seen nothing of the answer."""
        unseen = self.whole or not self.has_content
        return failure.code in RETRIED and self.attempt == 0 and unseen and not self.deaf

    def begin_again(self) -> None:
        if self.has_content:
            self.inbox.put(Restarted(self.index, len(self._finished)))
        self.attempt += 1
        self.trace.begin_again()
        self.has_content = False
        self.granted = None
        self._tokens.clear()
        self._finished.clear()
        self._next_seq.clear()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _prompt_counted_once(row: Row) -> Row:
    """The choices of one prompt share it: only the first one's usage has it."""
    if row.choice == 0 or row.usage is None:
        return row
    usage = msgspec.structs.replace(row.usage, prompt_tokens=0, cached_hot=0, cached_cold=0)
    return msgspec.structs.replace(row, usage=usage)
