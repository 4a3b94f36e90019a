"""Hidden directories in the models directory that a killed import or a killed removal left behind: gigabytes nobody sees.

An import holds a lock on the directory it fills, and takes one on the models directory while it makes it: that tells one that
still runs from one that is dead.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path

IMPORTING = ".importing-*"
REMOVED = ".removed-*"
REMOVED_AGE_S = 3600.0
"""A removal holds no lock; omlxctl may be doing one without a server."""


def remove_leftovers(models_dir: Path) -> list[Path]:
    """Deletes them; returns which. Blocks as long as deleting takes. Never raises for what it finds."""
    removed: list[Path] = []
    with contextlib.suppress(OSError), _locked(models_dir):
        removed += [path for path in models_dir.glob(IMPORTING) if _abandoned(path) and _delete(path)]
    for path in models_dir.glob(REMOVED):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > REMOVED_AGE_S and _delete(path):
                removed.append(path)
    return removed


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _delete(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
