"""Writes an answer as server-sent events: when the status is decided, what fills a silence, and how a stream may end.

A stream ends with the dialect's closing, or with its error event, or with an aborted connection; never with a clean end that
hides a missing part. What the events look like is the dialect's business.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from gateway.answer import Answer
from gateway.errors import ApiError, api_error
from gateway.inbox import Answered, Failed, Output, Restarted, Started, Update

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Chunks(Protocol):
    """A dialect's events. Each method returns whole events, or nothing."""

    def opening(self) -> bytes: ...
    def started(self, update: Started) -> None: ...
    def output(self, update: Output) -> bytes: ...
    def keep_alive(self) -> bytes: ...
    def closing(self) -> bytes: ...
    def error(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Pace:
    header_patience_s: float
    keepalive_s: float | None
    """None: silence is not filled."""

    def left_s(self, written_at: float) -> float | None:
        """Until silence has lasted too long."""
        return None if self.keepalive_s is None else max(0.0, written_at + self.keepalive_s - time.monotonic())


async def stream(request: web.Request, answer: Answer, chunks: Chunks, pace: Pace) -> web.StreamResponse:
    """Raises `ApiError` while the status is open; from then on errors are events."""
    updates = await _until_decided(answer, pace.header_patience_s)
    response = web.StreamResponse(headers=HEADERS)
    answer.inbox.on_overflow = lambda: _abort(request)
    await response.prepare(request)
    await response.write(chunks.opening())
    written_at = time.monotonic()
    while True:
        data, error = _render(updates, chunks)
        if not data and pace.left_s(written_at) == 0:
            data = chunks.keep_alive()
        if data:
            await response.write(data)
            written_at = time.monotonic()
            answer.sent(written_at)
        if error is not None:
            await response.write(chunks.error(error))
            break
        if not answer.unfinished:
            await response.write(chunks.closing())
            break
        updates = await answer.take(pace.left_s(written_at))
    await response.write_eof()
    return response


async def _until_decided(answer: Answer, patience_s: float) -> list[Update]:
    """Until every prompt is accepted, one fails, or patience ends. Returns what came meanwhile."""
    deadline = time.monotonic() + patience_s
    updates: list[Update] = []
    started: set[int] = set()
    while len(started) < answer.count and (left_s := deadline - time.monotonic()) > 0:
        for update in await answer.take(left_s):
            if isinstance(update, Failed):
                raise api_error(update.failure)
            if isinstance(update, Started):
                started.add(update.index)
            updates.append(update)
    return updates


def _render(updates: Sequence[Update], chunks: Chunks) -> tuple[bytes, ApiError | None]:
    """All that arrived since the last write as one write."""
    events: list[bytes] = []
    for update in updates:
        match update:
            case Output():
                events.append(chunks.output(update))
            case Started():
                chunks.started(update)
            case Answered() | Restarted():
                pass  # only who asks for no text gets one, and only a whole answer begins again
            case Failed():
                return b"".join(events), api_error(update.failure)
    return b"".join(events), None


def _abort(request: web.Request) -> None:
    """The client does not read: drop it with what is buffered, so that it cannot take the cut for an end."""
    if request.transport is not None:
        request.transport.abort()
