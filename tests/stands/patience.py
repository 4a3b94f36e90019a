"""Limits of time on cores that others may use, too."""

import os
from pathlib import Path

LEAST = 2.0


def patient_s(limit_s: float) -> float:
    """What a limit for free cores comes to now: twice as much, and in proportion to what waits for each core.

    For what is told apart from something far slower, or from never.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return limit_s * max(LEAST, 2 * max(os.getloadavg()[0], _running_now()) / cores)


def _running_now() -> int:
    """What wants a core at this moment, where the kernel tells: an average of the last minute is late to learn of it."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 0
