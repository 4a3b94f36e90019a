"""Facts about this machine that decide how much memory models may have and how fast they run. Reads, decides nothing."""

import ctypes.util
import platform
import subprocess
import sys
from pathlib import Path

import psutil

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SYSCTL = "/usr/sbin/sysctl"
"""Absolute: a service's PATH may not hold it."""


def total_ram_bytes() -> int:
    """Physical memory, or the control group's limit when that is lower."""
    total = psutil.virtual_memory().total
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def has_metal() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def wired_limit_bytes() -> int | None:
    """macOS: what `iogpu.wired_limit_mb` says; None where there is no such limit or it is not set."""
    if not has_metal():
        return None
    try:
        answer = subprocess.run([SYSCTL, "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=5, check=True)
        return int(answer.stdout) * 2**20 or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def slow_path_warning() -> str | None:
    """Why inference will be slow on this machine, if it will be."""
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists() or ctypes.util.find_library("openblas"):
        return None
    return (
        "OpenBLAS is not installed: MLX's CPU build falls back to a reference BLAS that is about 30 times slower "
        "(Debian, Ubuntu: sudo apt install libopenblas0-pthread)"
    )
