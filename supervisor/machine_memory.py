"""What the system says of its memory at this moment: available, swapped out, short by its own account, killed for.

Cheap enough to be read every second. Decides nothing: pressure.py does.
"""

import ctypes
import os
import sys
from pathlib import Path

import psutil

from supervisor.hardware import CGROUPS, group_and_parents
from supervisor.meter import footprint_bytes
from supervisor.pressure import Level

PRESSURE_SYSCTL = b"kern.memorystatus_vm_pressure_level"
KERNEL_LEVELS = {2: Level.SOFT, 4: Level.HARD}
"""macOS: 1 normal, 2 warning, 4 critical. On the system's word alone no running request is ended."""
VMSTAT = Path("/proc/vmstat")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def available_bytes(active_share: float) -> int:
    """What processes could get without swapping, by this process's control group, too.

    On macOS free, inactive and a share of active pages; on Linux the system's own estimate.
    """
    memory = psutil.virtual_memory()
    system_bytes = memory.available
    if sys.platform == "darwin":
        system_bytes += int(active_share * memory.active)
    groups = [left for group in group_and_parents(Path("/proc/self/cgroup"), CGROUPS) if (left := left_in(group)) is not None]
    return min([system_bytes, *groups])


def left_in(group: Path) -> int | None:
    """Of a control group's limit (version 2), cached files not counted as used; None where it has none."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used_bytes + int(counters.get("file", 0))) if limit.isdigit() else None


def swap() -> tuple[int, int]:
    """Bytes swapped out since the start, and swap in use; zeros where there is no swap."""
    memory = psutil.swap_memory()
    return memory.sout, memory.used


def kernel_level() -> Level:
    """What the system itself calls the state of its memory; none where it does not say."""
    if sys.platform != "darwin":
        return Level.NONE
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(PRESSURE_SYSCTL, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return Level.NONE if failed else level_of(value.value)


def level_of(kernel_value: int) -> Level:
    return KERNEL_LEVELS.get(kernel_value, Level.NONE)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for memory; None where it does not count them."""
    try:
        return oom_kills_of(VMSTAT.read_text())
    except OSError:
        return None


def oom_kills_of(vmstat: str) -> int | None:
    line = next((line for line in vmstat.splitlines() if line.startswith("oom_kill ")), None)
    return None if line is None else int(line.split()[1])


def private_bytes(pid: int) -> int:
    """What comes back when that process exits, as far as it is cheap to know; 0 for one that is gone. Pages of files stay."""
    if sys.platform == "darwin":
        return footprint_bytes(pid) or 0
    resident_bytes, shared_bytes = _statm(pid)
    return resident_bytes - shared_bytes


def resident_bytes(pid: int) -> int:
    """What of that process is in memory, pages of files included; 0 for one that is gone."""
    if sys.platform == "darwin":
        return footprint_bytes(pid) or 0
    return _statm(pid)[0]


def _statm(pid: int) -> tuple[int, int]:
    """Bytes resident, and of those the ones of files and shared memory."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as statm:  # every second, of every process: half of Path.read_text
            _, resident, shared, *_ = statm.read().split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * PAGE_BYTES, int(shared) * PAGE_BYTES
