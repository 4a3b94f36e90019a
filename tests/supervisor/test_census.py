"""What a killed server leaves behind: processes that ignore its end, and half-made model directories."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from supervisor.census import Census, end_survivors
from supervisor.leftovers import remove_leftovers
from tests.stands.patience import patient_s

STUCK = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def stuck() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-S", "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_of_a_former_server_that_ignores_its_end_is_killed(tmp_path: Path, stuck) -> None:
    Census(tmp_path / "c.json").born(stuck.pid)
    assert end_survivors(tmp_path / "c.json", going_s=0.2) == [stuck.pid]
    assert stuck.wait(60) == -9
    assert not (tmp_path / "c.json").exists()


def test_one_that_goes_by_itself_is_given_the_time(tmp_path: Path) -> None:
    leaving = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"])
    Census(tmp_path / "c.json").born(leaving.pid)
    assert end_survivors(tmp_path / "c.json", going_s=10) == []
    assert leaving.wait(60) == 0


def test_a_stranger_with_the_pid_of_a_former_child_is_left_alone(tmp_path: Path, stuck) -> None:
    (tmp_path / "c.json").write_text(json.dumps({stuck.pid: psutil.Process(stuck.pid).create_time() - 60}))
    assert end_survivors(tmp_path / "c.json", going_s=0) == []
    assert stuck.poll() is None


def test_children_that_ended_are_struck_off(tmp_path: Path, stuck) -> None:
    census = Census(tmp_path / "c.json")
    census.born(stuck.pid)
    census.died(stuck.pid)
    assert end_survivors(tmp_path / "c.json", going_s=0) == []
    assert stuck.poll() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"x": 1}', b'{"1": null}', b"\xff", b"null"])
def test_a_damaged_census_ends_nobody_and_raises_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    assert end_survivors(tmp_path / "c.json") == []


def test_without_a_census_there_is_nothing_to_do(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert end_survivors(tmp_path / "c.json") == []
    assert time.monotonic() - begun < patient_s(0.5)


def test_the_hidden_directory_of_a_dead_import_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    for name in (".importing-dead-1", ".importing-alive-2", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    held = os.open(tmp_path / ".importing-alive-2", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert remove_leftovers(tmp_path) == [tmp_path / ".importing-dead-1"]
    finally:
        os.close(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".importing-alive-2", "model"]


def test_a_removal_that_was_cut_short_is_finished_once_nobody_can_be_at_it(tmp_path: Path) -> None:
    for name in (".removed-old", ".removed-fresh"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".removed-old", (then := time.time() - 7200, then))
    assert remove_leftovers(tmp_path) == [tmp_path / ".removed-old"]
    assert (tmp_path / ".removed-fresh").exists()
    assert remove_leftovers(tmp_path / "nowhere") == []
