"""CPU seconds of a server's processes, and on Linux of the threads in them.

Which threads of the model's process are its engine is read off what they spent: the one that steps the batch, MLX's stream and
the matrix library's spend nearly all of it, and the many others next to nothing.
"""

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

SCHEDULED = 2
"""CPUCLOCK_SCHED: which clock of a process, in the number of it that clock_getcpuclockid(3) makes."""
ENGINE_SHARE = 0.05
"""A thread with this much of its process's CPU belongs to the engine; one with less does not."""


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since each process began, by role; per thread id where the system tells."""

    processes: Mapping[str, float]
    threads: Mapping[str, Mapping[int, float]]
    pids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Spent:
    total_s: float
    outside_engine_s: Mapping[str, float] | None
    """By role; None where threads cannot be told apart."""


def read(pids: Mapping[str, int]) -> Reading:
    return Reading(
        {role: _process(pid) for role, pid in pids.items()},
        {role: _threads(pid) for role, pid in pids.items()},
        pids,
    )


def spent(before: Reading, after: Reading, engine_role: str) -> Spent:
    by_role = {role: after.processes[role] - before.processes[role] for role in after.processes}
    total_s = sum(by_role.values())
    engine_s = _engine_s(before, after, engine_role)
    if engine_s is None:
        return Spent(total_s, None)
    by_role[engine_role] = max(0.0, by_role[engine_role] - engine_s)
    return Spent(total_s, by_role)


def _engine_s(before: Reading, after: Reading, role: str) -> float | None:
    then, now = before.threads[role], after.threads[role]
    used = {thread: seconds - then.get(thread, 0.0) for thread, seconds in now.items()}
    used.pop(after.pids[role], None)  # the main thread serves sockets
    total = after.processes[role] - before.processes[role]
    return sum(seconds for seconds in used.values() if seconds >= ENGINE_SHARE * total) if now else None


def _process(pid: int) -> float:
    """Of all its threads, those that have ended included. On Linux to the nanosecond, where psutil counts in hundredths."""
    if sys.platform != "linux":
        return sum(psutil.Process(pid).cpu_times()[:2])
    return time.clock_gettime(~pid << 3 | SCHEDULED)


def _threads(pid: int) -> dict[int, float]:
    if sys.platform != "linux":  # macOS tells only root
        return {}
    threads: dict[int, float] = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            threads[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return threads
