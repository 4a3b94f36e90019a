"""What one HTTP handler holds of its answer: one exchange per prompt, and the inbox they write to."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.errors import api_error
from gateway.inbox import Failed, Inbox, Output, Restarted, Update
from gateway.link import Link
from gateway.records import Record
from gateway.request import GenerateRequest
from supervisor.protocol import FinishReason, Usage


@dataclass(slots=True)
class Choice:
    """One finished answer."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    logprobs: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    finish: FinishReason | None = None
    usage: Usage | None = None


class Answer:
    def __init__(self, link: Link, record: Record, requests: Sequence[GenerateRequest]) -> None:
        self.inbox = Inbox()
        self.choices = sum(request.choices for request in requests)
        self.unfinished = self.choices
        self._link = link
        self._record = record
        self._exchanges = [link.start(record, index, request, self.inbox) for index, request in enumerate(requests)]

    @property
    def count(self) -> int:
        """Of the prompts; `choices` counts the answers."""
        return len(self._exchanges)

    def timings(self) -> dict[str, object]:
        """Where the time of the whole went."""
        return self._record.summary(time.monotonic()).body()

    def sent(self, now: float) -> None:
        """The client has taken some of it."""
        self._record.moved_at = now

    async def take(self, timeout_s: float | None = None) -> list[Update]:
        """As `Inbox.take`; keeps count of the choices that are still going."""
        updates = await self.inbox.take(timeout_s)
        for update in updates:
            if isinstance(update, Output) and update.row.finish is not None:
                self.unfinished -= 1
            elif isinstance(update, Restarted):
                self.unfinished += update.finished
        return updates

    async def whole(self) -> list[Choice]:
        """Every choice to its end; raises the `ApiError` of the first that fails. A lost worker is made up for once."""
        for exchange in self._exchanges:
            exchange.whole = True
        choices = [Choice() for _ in range(self.choices)]
        while self.unfinished:
            for update in await self.take():
                if isinstance(update, Failed):
                    raise api_error(update.failure)
                if isinstance(update, Restarted):
                    each = self.choices // self.count
                    choices[update.index * each : (update.index + 1) * each] = [Choice() for _ in range(each)]
                elif isinstance(update, Output):
                    _add(choices[update.index], update)
        return choices

    def leave(self) -> None:
        self.inbox.close()
        for exchange in self._exchanges:
            self._link.leave(exchange)


@contextmanager
def answer(link: Link, record: Record, requests: Sequence[GenerateRequest]) -> Generator[Answer]:
    """Whatever ends the handler, also a client that disconnects, ends what it asked for."""
    held = Answer(link, record, requests)
    try:
        yield held
    finally:
        held.leave()


def _add(choice: Choice, output: Output) -> None:
    row = output.row
    for piece in row.pieces:
        (choice.reasoning if piece.kind == "reasoning" else choice.text).append(piece.text)
    choice.logprobs += row.logprobs or ()
    if row.finish is not None:
        choice.finish, choice.usage = row.finish, row.usage
