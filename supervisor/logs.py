"""One log per process: the last lines in memory for `omlxctl logs` and crash reports, all of them in rotating files."""

import hashlib
import logging
import logging.handlers
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

RING_LINES = 2000
FILE_BYTES = 10 * 2**20
FILES_KEPT = 3
STAMP = "%Y-%m-%dT%H:%M:%S"
LINE_BYTES = 8192
"""A longer line is cut: a child that prints its tensors must not fill the ring."""

NAME_CHARS = 60
"""Of a log's name in its file's: a file name may have 255 bytes, and a letter four."""


def log_file(directory: Path, name: str) -> Path:
    """One file per name, whatever a model is called: two logs that rotate the same file would lose lines."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:NAME_CHARS]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return directory / f"{safe}.log"


class LogBook:
    """The log of one name (a model id, `gateway`, `omlxd`, …), across the restarts of its process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._ring: deque[tuple[str, str]] = deque(maxlen=RING_LINES)  # when, and what
        self._followers: list[Callable[[list[str]], None]] = []
        self._file = logging.handlers.RotatingFileHandler(
            log_file(directory, name), maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8", delay=True
        )
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Raw output of the process; complete lines are taken over."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._add([line[:LINE_BYTES].decode("utf-8", "replace").rstrip("\r") for line in lines])

    def end(self) -> None:
        """The process is gone: an unfinished last line counts too."""
        if self._rest:
            self.feed(b"\n")

    def say(self, line: str) -> None:
        self._add([line])

    def tail(self, lines: int) -> list[str]:
        """The last lines as the process wrote them."""
        return [line for _, line in self._last(lines)]

    def stamped(self, lines: int) -> list[str]:
        """The same as they are in the file, each after its time."""
        return [f"{stamp} {line}" for stamp, line in self._last(lines)]

    def _last(self, lines: int) -> list[tuple[str, str]]:
        return list(self._ring)[-lines:] if lines > 0 else []

    def follow(self, follower: Callable[[list[str]], None]) -> Callable[[], None]:
        """Calls `follower` with every batch of new lines, each after its time; the returned function ends it."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower) if follower in self._followers else None

    def close(self) -> None:
        self._file.close()

    def _add(self, lines: list[str]) -> None:
        if not lines:
            return
        stamp = time.strftime(STAMP)
        self._ring.extend((stamp, line) for line in lines)
        written = [f"{stamp} {line}" for line in lines]
        for line in written:
            self._file.emit(logging.makeLogRecord({"msg": line}))
        for follower in list(self._followers):
            follower(written)


class BookHandler(logging.Handler):
    """Sends the supervisor's own log records to its book."""

    def __init__(self, book: LogBook) -> None:
        super().__init__()
        self._book = book
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._book.say(self.format(record))


def remove_old_files(directory: Path, retention_days: int) -> int:
    """Deletes log files that nothing has written to for so long; returns how many."""
    oldest = time.time() - retention_days * 86400
    removed = 0
    for path in directory.glob("*.log*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
                removed += 1
        except OSError:
            continue
    return removed
