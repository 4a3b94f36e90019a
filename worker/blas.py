"""The matrix library under MLX's CPU build: loaded before MLX, its thread count set live.

Linux only. MLX's wheel links to reference BLAS (5 GFLOP/s on two cores); OpenBLAS with its symbols made global before
`import mlx` takes its place (117–271 GFLOP/s). Must not import mlx: importing it first would bind the slow symbols for good.
"""

import ctypes
import functools
import sys
from pathlib import Path

SONAMES = ("libopenblas.so.0", "libopenblasp.so.0")  # Debian's name; Fedora's for the threaded build


def load_openblas() -> str | None:
    """Loads OpenBLAS for the whole process; the file it came from, or None where there is none or none is needed."""
    library = _openblas()
    return None if library is None else _mapped_file(str(library._name))


def set_blas_threads(n: int) -> None:
    """How many threads one matrix product may use; does nothing without OpenBLAS.

    Two threads per worker under contention are 3–4 times slower than one, so this follows what the neighbours do.
    """
    library = _openblas()
    if library is not None:
        library.openblas_set_num_threads(ctypes.c_int(max(1, n)))


@functools.cache
def _openblas() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    for soname in SONAMES:
        try:
            return ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def _mapped_file(soname: str) -> str:
    """Where the loader found it, for `omlxctl doctor` and the log."""
    stem = soname.split(".so", 1)[0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split(maxsplit=5)[-1]
        if Path(file).name.startswith(stem):
            return file
    return soname
