"""Which models were busy of late, on the disk: after a power cut, a kernel panic or a kill -9 the next server says what ran.

Nothing else outlives such an end: requests get their line in the log when they are over. Written and flushed by a thread, and
seldom: when a model gets work that had none for a while.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

log = logging.getLogger("omlxd")

LINGER_S = 30.0
"""An agent's next request comes soon after the last answer: one write for all of them."""


class Breadcrumb:
    def __init__(self, path: Path, linger_s: float = LINGER_S) -> None:
        self._path = path
        self._linger_s = linger_s
        self._busy = self._written = frozenset[str]()
        self._forgetting: asyncio.TimerHandle | None = None
        self._writer = ThreadPoolExecutor(1, "breadcrumb")

    def at(self, busy: Iterable[str]) -> None:
        """The models that have requests now."""
        self._busy = frozenset(busy)
        if not self._busy <= self._written:
            self._write(self._written | self._busy)
        elif self._busy != self._written and self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(self._linger_s, self._forget)

    def close(self) -> None:
        """An end in order leaves none. Waits for what is being written."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._writer.submit(_put, self._path, frozenset())
        self._writer.shutdown()

    def _forget(self) -> None:
        self._forgetting = None
        if self._busy != self._written:
            self._write(self._busy)

    def _write(self, models: frozenset[str]) -> None:
        self._written = models
        loop = asyncio.get_running_loop()
        written = self._writer.submit(_put, self._path, models)
        written.add_done_callback(lambda done: loop.call_soon_threadsafe(_tell, self._path, done.result()))


def found(path: Path) -> str | None:
    """What the server before this one was at, for people; None if it ended in order or was idle. Takes it away."""
    try:
        left = cast("dict[str, object]", json.loads(path.read_bytes()))
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(left["at"]))))
        models = ", ".join(map(str, cast("list[object]", left["models"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        models, at = "nobody knows what", "an unknown time"  # cut in the middle, or not ours
    with contextlib.suppress(OSError):
        path.unlink()
    return f"the server before this one did not end in order; it was busy with {models} (written {at})"


def _tell(path: Path, problem: str) -> None:
    """On the loop: who follows the log is told by way of sockets that belong to its thread."""
    if problem:
        log.error("%s cannot be written: %s", path, problem)


def _put(path: Path, models: frozenset[str]) -> str:
    """What went wrong: of a full disk only this note is lost."""
    try:
        if not models:
            path.unlink(missing_ok=True)
            return ""
        fresh = path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump({"models": sorted(models), "at": time.time()}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as e:
        return str(e.strerror)
    return ""
