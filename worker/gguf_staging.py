"""The directory an import grows in: hidden until it is complete, gone if it never is.

It is held by a lock on the directory itself, so what a killed import leaves behind is told from one that is still running.
It knows nothing of what is written inside.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from worker.gguf import ImportRefused
from worker.gguf_shards import sync_to_disk

PREFIX = ".importing-"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Staging:
    """Context manager: `path` is the hidden directory, `publish` gives it its name, leaving without that removes it."""

    def __init__(self, models_dir: Path, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ImportRefused(
                "bad_name", f"{name!r} cannot be a model's name: use letters, digits, dot, dash and underscore."
            )
        self._models_dir = models_dir
        self._name = name
        self._target = models_dir / name
        self.path = models_dir / f"{PREFIX}{name}-{os.getpid()}"
        self._fd: int | None = None

    def __enter__(self) -> Staging:
        self._models_dir.mkdir(parents=True, exist_ok=True)
        # Between making a directory and locking it nobody else may look for leftovers.
        with _locked(self._models_dir):
            self._refuse_taken()
            _remove_leftovers(self._models_dir)
            self.path.mkdir()
            self._fd = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.discard()

    def publish(self) -> Path:
        sync_to_disk(self.path)
        with _locked(self._models_dir):
            self._refuse_taken()
            self.path.rename(self._target)
        sync_to_disk(self._target)
        return self._target

    def discard(self) -> None:
        """Does nothing after `publish`: the hidden name no longer exists."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _refuse_taken(self) -> None:
        if self._target.exists():
            raise ImportRefused(
                "name_taken", f"{self._target} exists already. Choose another --name, or remove that model first."
            )


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_leftovers(models_dir: Path) -> None:
    for leftover in models_dir.glob(f"{PREFIX}*"):
        try:
            fd = os.open(leftover, os.O_RDONLY)
        except FileNotFoundError:  # an import that has just ended took it away
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a living import
        else:
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(fd)
