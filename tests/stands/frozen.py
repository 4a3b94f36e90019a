"""A thread that stops while its process goes on, as one does that waits for a GPU which never answers. Linux only.

Nothing in the process helps: the kernel holds the thread for a tracer, and the process' own parent may trace what it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from pathlib import Path

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000  # wait for threads too


def busiest_thread(pid: int, over_s: float = 0.15) -> int:
    """The one that used most CPU time meanwhile."""

    def used() -> dict[int, int]:
        stats = {int(task.name): (task / "stat").read_text().rsplit(")", 1)[1].split() for task in _tasks(pid)}
        return {tid: int(stat[11]) + int(stat[12]) for tid, stat in stats.items()}

    before = used()
    time.sleep(over_s)
    return max(((ticks - before.get(tid, 0), tid) for tid, ticks in used().items()))[1]


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def freeze(tid: int) -> threading.Thread:
    """Stops that thread for good; the result ends when its process has been killed. Raises OSError if it may not be traced."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    begun, failures = threading.Event(), []

    def hold() -> None:
        """All of it on one thread, and to the end: a traced thread is not gone before its tracer has waited for it."""
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            if libc.ptrace(request, tid, None, None) != 0:
                failures.append(ctypes.get_errno())
                break
        begun.set()
        with contextlib.suppress(ChildProcessError):
            while not failures and not os.WIFSIGNALED(os.waitpid(tid, WALL)[1]):
                pass

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    begun.wait()
    if failures:
        raise OSError(failures[0], f"thread {tid} cannot be traced: {errno.errorcode.get(failures[0])}")
    return holder
