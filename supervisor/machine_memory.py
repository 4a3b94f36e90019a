"""What the system says of its memory at this moment: available, swapped out, short by its own account, killed for.

Cheap enough to be read every second. Decides nothing: pressure.py does.
"""

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
    return min([system_bytes, *[left for group in _limited_groups() if (left := left_in(group)) is not None]])


@functools.cache
def _limited_groups() -> list[Path]:
    """Of this process, which is put into its group before it runs; what the limit of a group is may change at any time."""
    return [group for group in group_and_parents(Path("/proc/self/cgroup"), CGROUPS) if (group / "memory.max").exists()]


def left_in(group: Path) -> int | None:
    """Of a control group's limit (version 2), cached files not counted as used; None where it has none."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used_bytes + int(counters.get("file", 0))) if limit.isdigit() else None


@dataclass(frozen=True, slots=True)
class Paging:
    """What the system has done to make room, since it started."""

    swapped_out_bytes: int
    swap_used_bytes: int
    """Now; zero where there is no swap."""
    oom_kills: int | None
    """Processes that the kernel has killed for memory; None where it does not count them."""


def paging() -> Paging:
    try:
        counted = VMSTAT.read_bytes()
    except OSError:
        memory = psutil.swap_memory()
        return Paging(memory.sout, memory.used, None)
    return paging_of(counted, lambda: psutil.swap_memory().used)


def paging_of(vmstat: bytes, used_bytes: Callable[[], int]) -> Paging:
    """`used_bytes` is asked only where something was ever swapped out, if only into zswap: it costs as much as all the rest."""
    swapped_out_bytes = (_counter(vmstat, b"pswpout") or 0) * PAGE_BYTES
    has_swapped = swapped_out_bytes or _counter(vmstat, b"zswpout")
    return Paging(swapped_out_bytes, used_bytes() if has_swapped else 0, _counter(vmstat, b"oom_kill"))


def _counter(vmstat: bytes, name: bytes) -> int | None:
    found = re.search(rb"^%b (\d+)$" % name, vmstat, re.MULTILINE)
    return None if found is None else int(found[1])


def kernel_level() -> Level:
    """What the system itself calls the state of its memory; none where it does not say."""
    if sys.platform != "darwin":
        return Level.NONE
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(PRESSURE_SYSCTL, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return Level.NONE if failed else level_of(value.value)


def level_of(kernel_value: int) -> Level:
    return KERNEL_LEVELS.get(kernel_value, Level.NONE)


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
