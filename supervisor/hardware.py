"""Facts about this machine that decide how much memory models may have and how fast they run. Reads, decides nothing."""

import ctypes.util
import platform
import subprocess
import sys
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_V1_LIMIT = CGROUPS / "memory" / "memory.limit_in_bytes"
SYSCTL = "/usr/sbin/sysctl"
"""Absolute: a service's PATH may not hold it."""


def total_ram_bytes() -> int:
    """Physical memory, or the control group's limit when that is lower."""
    total = psutil.virtual_memory().total
    return min([total, *cgroup_limits_bytes(Path("/proc/self/cgroup"), CGROUPS), *_limit_in(CGROUP_V1_LIMIT)])


def cgroup_limits_bytes(membership: Path, root: Path) -> list[int]:
    """The limits of this process's control group and of those around it (version 2); each of them holds."""
    return [limit for place in group_and_parents(membership, root) for limit in _limit_in(place / "memory.max")]


def group_and_parents(membership: Path, root: Path) -> list[Path]:
    """The directories of this process's control group and of those around it (version 2)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    group = root / own
    return [place for place in (group, *group.parents) if place.is_relative_to(root)]


def _limit_in(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []


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
