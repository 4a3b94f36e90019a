"""What is read of the machine's memory, and that the readings move with it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervisor import machine_memory
from supervisor.hardware import group_and_parents
from supervisor.pressure import Level

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_that_takes_memory_has_more_that_will_come_back() -> None:
    gc.collect()
    before = machine_memory.private_bytes(os.getpid())
    ballast = bytearray(os.urandom(1 << 16) * 512)
    grown = machine_memory.private_bytes(os.getpid()) - before
    assert len(ballast) * 0.9 < grown < len(ballast) * 2
    assert machine_memory.private_bytes(2**22 + 1) == 0


def test_what_is_available_falls_by_what_another_process_takes() -> None:
    """Not by all of it: the kernel keeps some hundred MiB of free pages at hand for each core, and counts them for nobody."""
    hold = "import os, sys; b = bytearray(os.urandom(1 << 20)); b *= 1600; print(len(b), flush=True); sys.stdin.read()"
    for _ in range(5):  # another program may free as much in that very moment
        before = machine_memory.available_bytes(0.0)
        with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline()
            during = machine_memory.available_bytes(0.0)
            child.communicate()
        assert 0 < during <= psutil.virtual_memory().total
        if before - during > 300 * MIB:
            return
    pytest.fail("what is available does not fall by what another process takes")


@pytest.mark.parametrize(
    ("said", "level"), [(1, Level.NONE), (2, Level.SOFT), (4, Level.HARD), (0, Level.NONE), (9, Level.NONE)]
)
def test_the_levels_of_macos_are_ours(said: int, level: Level) -> None:
    assert machine_memory.level_of(said) is level


def test_swap_and_kernel_can_be_asked_here() -> None:
    paging = machine_memory.paging()
    assert min(paging.swapped_out_bytes, paging.swap_used_bytes) >= 0
    assert machine_memory.kernel_level() in Level


def test_kills_for_memory_and_pages_swapped_out_are_counted_where_the_kernel_does() -> None:
    page = machine_memory.PAGE_BYTES
    quiet = machine_memory.paging_of(b"pgfault 1\npswpout 0\noom_kill 7\nswap_ra 0\n", lambda: 1 // 0)
    assert quiet == machine_memory.Paging(0, 0, 7)
    assert machine_memory.paging_of(b"pswpout 0\nzswpout 2\n", lambda: 5) == machine_memory.Paging(0, 5, None)
    assert machine_memory.paging_of(b"pswpin 1\npswpout 3\nnr_pswpout 9\n", lambda: 5) == machine_memory.Paging(
        3 * page, 5, None
    )


@linux_only
def test_the_kernels_counters_are_those_that_psutil_reads() -> None:
    before = psutil.swap_memory().sout
    read = machine_memory.paging().swapped_out_bytes * 4096 // machine_memory.PAGE_BYTES  # psutil takes all pages for 4 KiB
    assert before <= read <= psutil.swap_memory().sout


@linux_only
def test_the_memory_of_a_control_group_is_its_limit_less_what_is_no_cache(tmp_path: Path) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n")
    for name, text in (("memory.max", "1000"), ("memory.current", "700"), ("memory.stat", "anon 400\nfile 300")):
        (group / name).write_text(text + "\n")
    assert group_and_parents(tmp_path / "membership", tmp_path) == [group, tmp_path / "a", tmp_path]
    assert machine_memory.left_in(group) == 600
    (group / "memory.max").write_text("max\n")
    assert machine_memory.left_in(group) is None and machine_memory.left_in(tmp_path) is None
