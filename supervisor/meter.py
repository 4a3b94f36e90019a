"""How much memory a process takes, as the system counts it: each byte once, GPU and compressed memory included.

macOS: `phys_footprint`, what Activity Monitor shows; resident size misses GPU and compressed memory there. Linux: PSS, in which
shared pages count by share. Elsewhere, and of a process that is gone, there is no reading.
"""

import ctypes
import sys
from pathlib import Path

LIBPROC = "/usr/lib/libproc.dylib"
RUSAGE_INFO_V0 = 0
_COUNTERS = (
    *("user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups", "pageins", "wired_size", "resident_size"),
    *("phys_footprint", "proc_start_abstime", "proc_exit_abstime"),
)


class RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>; every later version begins with it."""

    _fields_ = [("ri_uuid", ctypes.c_uint8 * 16), *((f"ri_{name}", ctypes.c_uint64) for name in _COUNTERS)]


def footprint_bytes(pid: int) -> int | None:
    """None when there is no such process, or no meter for this system. May take 100 ms for a process of tens of gigabytes."""
    if sys.platform == "darwin":
        return _phys_footprint_bytes(pid)
    try:
        return pss_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return None


def pss_bytes(rollup: str) -> int | None:
    """From the text of smaps_rollup; None for a process that has no memory any more."""
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _phys_footprint_bytes(pid: int) -> int | None:
    info = RusageInfo()
    if ctypes.CDLL(LIBPROC).proc_pid_rusage(pid, RUSAGE_INFO_V0, ctypes.byref(info)) != 0:
        return None
    return int(info.ri_phys_footprint)
