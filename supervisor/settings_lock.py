"""Who may change settings.json: one at a time, from reading it to having written it. Two at once would lose one of the changes.

The home itself is locked, for as long as a descriptor of it is open: nothing is left behind by whoever dies meanwhile.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 10.0
"""A change takes milliseconds. Whoever holds it for longer hangs, and nobody hangs with it."""
LOOK_S = 0.01


class NotWritten(Exception):
    """The file does not hold what was to be written."""


@contextmanager
def changing(home: Path, wait_s: float = WAIT_S) -> Generator[None]:
    """Raises `NotWritten` when somebody else does not get done, and OSError for a home that cannot be."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, home, wait_s)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, home: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotWritten(f"another process is changing the settings in {home} and does not get done") from None
        time.sleep(LOOK_S)
