"""One real child process: lifeline, output, signals, exit, and nothing left over."""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.process import Child, Exit

LIMIT_S = 60.0
"""Of what happens at once."""


class Nursery:
    """Starts children and remembers what they said and how they ended."""

    def __init__(self, directory: Path) -> None:
        self.book = LogBook("child", directory)
        self.census = Census(directory / "children.json")
        self.exits: list[Exit] = []
        self.ended = asyncio.Event()

    def start(self, code: str, *args: str, on_output: Callable[[bytes], None] | None = None) -> Child:
        def command(lifeline: int) -> Sequence[str]:
            return [sys.executable, "-S", "-c", code, str(lifeline), *args]

        return Child(self.book, self.census, self._exited, command=command, on_output=on_output)

    def _exited(self, how: Exit) -> None:
        self.exits.append(how)
        self.ended.set()

    async def end(self) -> Exit:
        async with asyncio.timeout(LIMIT_S):
            await self.ended.wait()
        return self.exits[0]

    async def said(self, line: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while line not in self.book.tail(100):
                await asyncio.sleep(0.01)


@pytest.fixture
def nursery(tmp_path: Path) -> Nursery:
    return Nursery(tmp_path)


async def test_output_of_both_streams_goes_to_the_log_and_the_exit_is_reported_once(nursery: Nursery) -> None:
    nursery.start("import sys; print('out'); print('err', file=sys.stderr); sys.exit(65)")
    assert await nursery.end() == Exit(65, None)
    await asyncio.sleep(0.1)
    assert len(nursery.exits) == 1
    assert sorted(nursery.book.tail(9)) == ["err", "out"]


async def test_what_was_written_just_before_the_exit_is_there_when_the_exit_is_reported(nursery: Nursery) -> None:
    nursery.start("import os; os.write(1, b'x' * 60000 + b'\\nlast words'); os._exit(3)")
    assert await nursery.end() == Exit(3, None)
    assert nursery.book.tail(1) == ["last words"]


async def test_death_by_a_signal_is_told_from_an_exit_code(nursery: Nursery) -> None:
    child = nursery.start("import time; print('up', flush=True); time.sleep(60)")
    await nursery.said("up")
    child.signal(signal.SIGTERM)
    how = await nursery.end()
    assert how == Exit(None, signal.SIGTERM) and str(how) == "killed by SIGTERM"
    child.signal(signal.SIGTERM)  # reaped: the pid may be somebody else's by now
    child.kill()


async def test_a_child_sees_its_lifeline_end_with_the_supervisor(nursery: Nursery) -> None:
    child = nursery.start(
        "import os, sys; print('up', flush=True); os.read(int(sys.argv[1]), 1); print('orphaned'); sys.exit(7)"
    )
    await nursery.said("up")
    await asyncio.sleep(0.1)
    assert not nursery.exits
    child.cut_lifeline()
    assert await nursery.end() == Exit(7, None)
    assert "orphaned" in nursery.book.tail(9)


async def test_no_child_holds_the_lifeline_of_another(nursery: Nursery) -> None:
    """If the second inherited the first's write end, the first would live on for as long as the second."""
    first = nursery.start("import os, sys; print('up', flush=True); os.read(int(sys.argv[1]), 1)")
    await nursery.said("up")
    second = nursery.start("import time; time.sleep(60)")
    first.cut_lifeline()
    assert await nursery.end() == Exit(0, None)
    second.kill()


async def test_kill_takes_the_descendants_too(nursery: Nursery) -> None:
    child = nursery.start(
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    async with asyncio.timeout(LIMIT_S):
        while not nursery.book.tail(1):
            await asyncio.sleep(0.01)
    grandchild = psutil.Process(int(nursery.book.tail(1)[0]))
    child.kill()
    assert await nursery.end() == Exit(None, signal.SIGKILL)
    assert await asyncio.to_thread(gone, grandchild)


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(LIMIT_S)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


async def test_a_descendant_that_keeps_the_pipe_open_does_not_hold_up_the_report(nursery: Nursery) -> None:
    nursery.start(
        "import subprocess; p = subprocess.Popen(['sh', '-c', 'echo noise; exec sleep 600']); print('began', p.pid, flush=True)"
    )
    try:
        assert await nursery.end() == Exit(0, None)
    finally:
        (descendant,) = [line.split()[1] for line in nursery.book.tail(9) if line.startswith("began ")]
        os.kill(int(descendant), signal.SIGKILL)


async def test_a_child_is_in_the_census_as_long_as_it_lives(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.start("import time; time.sleep(60)")
    assert list(json.loads((tmp_path / "children.json").read_text())) == [str(child.pid)]
    child.kill()
    await nursery.end()
    assert json.loads((tmp_path / "children.json").read_text()) == {}


async def test_json_output_is_kept_apart_from_the_log(nursery: Nursery) -> None:
    said: list[bytes] = []
    nursery.start("import sys; print('{}'); print('a warning', file=sys.stderr)", on_output=said.append)
    await nursery.end()
    assert b"".join(said) == b"{}\n"
    assert nursery.book.tail(9) == ["a warning"]


async def test_a_child_gets_no_input_and_no_descriptor_that_it_was_not_given(nursery: Nursery) -> None:
    with socket_pair() as (mine, _):
        nursery.start("import os, sys; print(sorted(map(int, os.listdir('/dev/fd')))); print(repr(sys.stdin.read()))")
        await nursery.end()
        fds, stdin = nursery.book.tail(2)
        assert str(mine) not in fds.strip("[]").split(", ")
        assert stdin == "''"


class socket_pair:
    def __enter__(self) -> tuple[int, int]:
        self.pair = os.pipe()
        return self.pair

    def __exit__(self, *_: object) -> None:
        for fd in self.pair:
            os.close(fd)


async def test_fifty_children_leave_neither_descriptors_nor_threads_nor_zombies(nursery: Nursery) -> None:
    async def one() -> None:
        nursery.ended.clear()
        nursery.start("pass")
        await nursery.end()

    await one()
    process = psutil.Process()
    gc.collect()  # what earlier tests have forgotten is closed now, not while it is counted
    before, threads = process.num_fds(), threading.active_count()
    for _ in range(5):
        nursery.exits.clear()
        children = [nursery.start("pass") for _ in range(10)]
        async with asyncio.timeout(LIMIT_S):
            while len(nursery.exits) < len(children):
                await asyncio.sleep(0.01)
    assert process.num_fds() <= before
    async with asyncio.timeout(LIMIT_S):
        while threading.active_count() > threads + 1:  # one that has told of its child's end is not gone at once
            await asyncio.sleep(0.01)
    assert not [c for c in process.children() if c.status() == psutil.STATUS_ZOMBIE]


async def test_a_process_that_cannot_be_had_is_an_os_error_and_costs_nothing(nursery: Nursery, monkeypatch) -> None:
    process = psutil.Process()
    gc.collect()
    before, children = process.num_fds(), process.children()
    with pytest.raises(OSError):
        Child(nursery.book, nursery.census, nursery._exited, command=lambda lifeline: ["/does/not/exist"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free: there may be gaps
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(OSError):
            nursery.start("pass")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError):
        nursery.start("import time; time.sleep(60)")
    assert process.num_fds() <= before
    assert process.children() == children
    assert not nursery.exits


async def test_a_child_stays_in_our_process_group_and_is_signalled_alone(nursery: Nursery) -> None:
    """launchd cleans up by group; and a signal to the group would hit everybody."""
    child = nursery.start("import time; print('up', flush=True); time.sleep(60)")
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    await nursery.said("up")
    assert os.getpgid(child.pid) == os.getpgid(0)
    child.kill()
    await nursery.end()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
