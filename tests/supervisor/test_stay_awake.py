"""The machine is kept from falling asleep while requests run, a little longer, and not for ever."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.settings_load import Loaded, load
from supervisor.stay_awake import StayAwake, command_for

SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")


@dataclass
class Shell:
    census: Census
    log: LogBook
    loaded: Loaded

    def book(self, name: str) -> LogBook:
        return self.log


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(Census(tmp_path / "children.json"), LogBook("omlxd", tmp_path), load({}, {}, tmp_path))


async def ended(awake: StayAwake) -> bool:
    """Whether it has learnt that its program is gone."""
    deadline = time.monotonic() + 60
    while awake.pid is not None and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return awake.pid is None


async def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_macos_has_caffeinate_by_its_absolute_path_and_it_ends_with_the_server() -> None:
    assert command_for("darwin", 7, lambda _: None) == ("/usr/bin/caffeinate", "-i", "-w", "7")


def test_linux_has_systemd_inhibit_or_nothing() -> None:
    assert command_for("linux", 7, lambda _: None) is None
    command = command_for("linux", 7, lambda name: f"/bin/{name}")
    assert command is not None
    assert command[:2] == ("/bin/systemd-inhibit", "--what=idle")
    assert command[-4:] == ("/bin/tail", "--pid=7", "-f", "/dev/null")


async def test_the_promise_is_held_from_the_first_request_until_a_while_after_the_last(shell: Shell) -> None:
    awake = StayAwake(shell, SLEEPS, linger_s=0.3)
    awake.demand(0)
    assert awake.pid is None
    awake.demand(1)
    pid = awake.pid
    assert pid is not None
    awake.demand(0)
    await asyncio.sleep(0)  # no time at all, however busy the machine is
    awake.demand(2)
    await asyncio.sleep(0.5)
    assert awake.pid == pid and psutil.pid_exists(pid), "the next request came in time"
    awake.demand(0)
    assert await gone(pid) and await ended(awake)
    awake.demand(1)
    assert awake.pid not in (None, pid), "and once more"
    awake.let_go()
    assert await gone(awake.pid or 0)


async def test_a_program_that_does_not_stay_is_not_asked_again_and_again(shell: Shell) -> None:
    awake = StayAwake(shell, (sys.executable, "-c", "raise SystemExit(1)"))
    awake.demand(1)
    assert await ended(awake)
    awake.demand(1)
    assert awake.pid is None


async def test_nothing_is_held_where_there_is_nothing_for_it_or_the_settings_do_not_want_it(shell: Shell) -> None:
    missing = StayAwake(shell, ("/nowhere/caffeinate",))
    missing.demand(1)
    assert missing.pid is None
    shell.loaded = load({"OMLX_STAY_AWAKE": "false"}, {}, shell.loaded.home)
    unwanted = StayAwake(shell, SLEEPS)
    unwanted.demand(1)
    assert unwanted.pid is None
