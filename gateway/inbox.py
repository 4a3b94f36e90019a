"""What one HTTP handler has yet to read of its answer: bounded, so that a client which stops reading costs only itself.

Filled by the link, emptied by the handler, both on the event loop. Several exchanges of one handler share an inbox.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.errors import Failure
from supervisor.protocol import Accepted, Row

MAX_ROWS = 1000
MAX_TEXT_CHARS = 1 << 20
STALLED_AFTER_S = 1.0
"""A burst within one turn of the loop is no slow reader: only a handler that has not come by for this long is."""


@dataclass(frozen=True, slots=True)
class Started:
    """The worker accepted the request: its prompt is fine and its turn will come."""

    index: int
    accepted: Accepted


@dataclass(frozen=True, slots=True)
class Output:
    index: int
    row: Row


@dataclass(frozen=True, slots=True)
class Answered:
    """All of an answer that does not stream; the last update of its exchange."""

    index: int
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Restarted:
    """A whole answer that nobody has seen any of begins again: what came of it so far is void."""

    index: int
    """Of the exchange, among those of one handler."""
    finished: int
    """Choices that had had their last row."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last update of its exchange."""

    index: int
    failure: Failure


Update = Started | Output | Answered | Restarted | Failed


class Inbox:
    def __init__(self) -> None:
        self.on_overflow: Callable[[], None] | None = None
        """Called once when the handler stalls with the bounds exceeded; has to end the request."""
        self._updates: list[Update] = []
        self._text_chars = 0
        self._waiter: asyncio.Future[None] | None = None
        self._waits_until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        """One for many waits: most end long before their time, and a timer of each would cost more than what it waits for."""
        self._rings_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._taken_at = self._loop.time()

    def put(self, update: Update) -> None:
        self._updates.append(update)
        if isinstance(update, Output):
            for piece in update.row.pieces:
                self._text_chars += len(piece.text)
            if len(self._updates) > MAX_ROWS or self._text_chars > MAX_TEXT_CHARS:
                self._check_reader()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float | None = None) -> list[Update]:
        """Everything there is, waiting for at least one update; empty once `timeout_s` has passed."""
        if not self._updates:
            self._waiter = self._loop.create_future()
            if timeout_s is not None:
                self._wake_at(self._loop.time() + timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter = self._waits_until = None
        updates, self._updates = self._updates, []
        self._text_chars = 0
        self._taken_at = self._loop.time()
        return updates

    def close(self) -> None:
        """Nobody takes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_at(self, until: float) -> None:
        self._waits_until = until
        if self._timer is None or self._rings_at > until:
            self.close()
            self._rings_at = until  # uvloop's handle of what is due at once does not know it
            self._timer = self._loop.call_at(until, self._time_out)

    def _time_out(self) -> None:
        """Set for a wait that may be over long since: then for the one of now, if there is one."""
        self._timer = None
        if self._waiter is None or self._waiter.done() or self._waits_until is None:
            return
        if self._waits_until <= self._rings_at:
            self._waiter.set_result(None)
        else:
            self._wake_at(self._waits_until)

    def _check_reader(self) -> None:
        if self.on_overflow is not None and self._loop.time() - self._taken_at > STALLED_AFTER_S:
            on_overflow, self.on_overflow = self.on_overflow, None
            on_overflow()
