"""Which processes a server has started: written down, so that the next one finds what outlived a server that was killed.

A child sees the supervisor's end by its lifeline, and on Linux by a signal; this is for one that can obey neither, because it
hangs. A pid is believed only together with the time its process was started.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import psutil

log = logging.getLogger("census")

GOING_S = 2.0
"""An orphan that sees its lifeline end saves what it can and is gone within 1.5 s."""
KILLED_S = 5.0
LOOK_S = 0.02
SAME_START_S = 1.0
"""psutil computes the start from the boot time, which moves a little with the clock."""


class Census:
    """The living children of this server, on disk since each was born."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started: dict[int, float] = {}

    def born(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):  # it is gone already
            self._started[pid] = psutil.Process(pid).create_time()
            self._write()

    def died(self, pid: int) -> None:
        if self._started.pop(pid, None) is not None:
            self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(self._started))
            fresh.replace(self._path)
        except OSError as e:  # a full disk: the lifelines still hold
            log.error("%s cannot be written: %s", self._path, e.strerror)


def end_survivors(path: Path, going_s: float = GOING_S) -> list[int]:
    """Ends the children of a former server; returns the pids that did not go by themselves. Blocks.

    The caller holds the instance lock, so nobody has a use for them any more.
    """
    survivors = _wait(of_former_server(path), going_s)
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            for descendant in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            process.kill()
    _wait(survivors, KILLED_S)
    path.unlink(missing_ok=True)
    return [process.pid for process in survivors]


def of_former_server(path: Path) -> list[psutil.Process]:
    """Those it had started that still live."""
    return [process for pid, started in _read(path) if (process := _same(pid, started))]


def _read(path: Path) -> list[tuple[int, float]]:
    try:
        written = json.loads(path.read_bytes())
        return [(int(pid), float(started)) for pid, started in cast("dict[str, float]", written).items()]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def _same(pid: int, started: float) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - started) < SAME_START_S:
            return process
    return None


def _wait(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that still live at the end of that time."""
    deadline = time.monotonic() + within_s
    while (living := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return living


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
