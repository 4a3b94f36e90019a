"""From the engine's thread to the event loop: one hop per call, and one call per engine step.

Rows in mid-answer go out on the engine's thread itself: to wake another thread for each step cost more than to send them, and
that thread may have to wait for the interpreter while the next step begins. They never overtake what was said before.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from supervisor.protocol import Activity, AskTurn, GiveTurn, Row
from worker.job import Loaded, LoadStage


class OnLoop(Protocol):
    """The engine's news, on the event loop."""

    def on_progress(self, stage: LoadStage, done: int, total: int) -> None: ...

    def on_loaded(self, info: Loaded) -> None: ...

    def on_failed(self, code: str, message: str, exit_code: int) -> None: ...

    def on_accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None: ...

    def send_rows(self, rows: list[Row]) -> bool:
        """On the engine's thread: sends them at once, or says that the loop has to."""
        ...

    def on_rows(self, rows: list[Row]) -> None: ...

    def on_want(self, kv_bytes: int) -> None: ...

    def on_tell(self, message: Activity | AskTurn | GiveTurn) -> None: ...

    def on_error(self, rid: str, code: str, message: str) -> None: ...


class EngineSink:
    """`worker.job.Sink`; never blocks the engine thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: OnLoop) -> None:
        self._loop = loop
        self._listener = listener
        self._said = 0
        """Hops so far, counted on the engine's thread."""
        self._heard = 0
        """How many of them have been made, counted on the loop."""

    def progress(self, stage: LoadStage, done: int, total: int) -> None:
        self._hop(self._listener.on_progress, stage, done, total)

    def loaded(self, info: Loaded) -> None:
        self._hop(self._listener.on_loaded, info)

    def failed(self, code: str, message: str, exit_code: int) -> None:
        self._hop(self._listener.on_failed, code, message, exit_code)

    def accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None:
        self._hop(self._listener.on_accepted, rid, cached_hot, cached_cold, position)

    def rows(self, rows: list[Row]) -> None:
        if self._heard != self._said or not self._listener.send_rows(rows):
            self._hop(self._listener.on_rows, rows)

    def want(self, kv_bytes: int) -> None:
        self._hop(self._listener.on_want, kv_bytes)

    def tell(self, message: Activity | AskTurn | GiveTurn) -> None:
        self._hop(self._listener.on_tell, message)

    def error(self, rid: str, code: str, message: str) -> None:
        self._hop(self._listener.on_error, rid, code, message)

    def _hop(self, then: Callable[..., None], *args: object) -> None:
        self._said += 1
        hop(self._loop, self._hear, then, args)

    def _hear(self, then: Callable[..., None], args: tuple[object, ...]) -> None:
        try:
            then(*args)
        finally:
            self._heard += 1


def hop(loop: asyncio.AbstractEventLoop, then: Callable[..., None], *args: object) -> None:
    """Calls `then` on the loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is leaving, nobody listens
        loop.call_soon_threadsafe(then, *args)
