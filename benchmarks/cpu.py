"""CPU seconds of a server's processes, and on Linux of the threads in them.

Which threads of the model's process are its engine is read off what they spent: the one that steps the batch, MLX's stream and
the matrix library's spend nearly all of it, and the many others next to nothing.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

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
    processes = {role: psutil.Process(pid) for role, pid in pids.items()}
    return Reading(
        {role: sum(process.cpu_times()[:2]) for role, process in processes.items()},
        {role: _threads(process) for role, process in processes.items()},
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


def _threads(process: psutil.Process) -> dict[int, float]:
    if sys.platform != "linux":  # macOS tells only root
        return {}
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
