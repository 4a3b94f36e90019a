"""The processes beside the models' workers: started again at once, then ever later; the gateway may not die too often."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from supervisor.attendants import Attendant, Duty, pause_after
from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.protocol import ChildStatus

SLEEPS = "import time; time.sleep(60)"


class Watched:
    """One attendant that runs `code`, and all that it reported."""

    def __init__(
        self, directory: Path, code: str, *, indispensable: bool = False, greets: bool = True, **limits: float
    ) -> None:
        self.lost: list[str] = []
        self.states: list[ChildStatus] = []
        self.given_up: list[str] = []
        self.begun: list[tuple[str, str]] = []

        def command(identity: str, nonce: str, lifeline: int) -> Sequence[str]:
            self.begun.append((identity, nonce))
            return [sys.executable, "-S", "-c", code]

        self.attendant = Attendant(
            Duty("gateway", "g", command, indispensable=indispensable, greets=greets),
            LogBook("gateway", directory),
            Census(directory / "children.json"),
            on_lost=self.lost.append,
            on_change=self.states.append,
            give_up=self.given_up.append,
            **{"hello_s": 60.0, "beat_lost_s": 60.0, **limits},
        )

    async def until(self, condition, within_s: float = 60) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)


def test_the_first_restart_comes_at_once_and_the_next_ones_after_1_2_and_4_seconds() -> None:
    assert pause_after(1) < 0.1
    assert [pause_after(deaths) for deaths in (2, 3, 4, 5)] == [1, 2, 4, 8]
    assert pause_after(1000) == 30


async def test_one_that_dies_is_started_again_under_a_new_name_and_a_new_nonce(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPS)
    watched.attendant.start()
    first = watched.attendant.pid
    assert first is not None
    psutil.Process(first).kill()
    await watched.until(lambda: len(watched.begun) == 2)
    assert watched.lost == ["g.1"]
    assert watched.attendant.identity == b"g.2"
    assert watched.attendant.pid not in (None, first)
    assert watched.begun[0][1] != watched.begun[1][1] == watched.attendant.nonce
    assert [s.state for s in watched.states] == ["starting", "backoff", "starting"]
    assert watched.attendant.status().restarts == 1
    await watched.attendant.leave(0.5)


async def test_five_deaths_in_a_minute_of_the_one_that_is_needed_end_it_all_with_its_last_words(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("supervisor.attendants.pause_after", lambda deaths: 0.01)
    watched = Watched(tmp_path, "print('no such module: aiohttp'); raise SystemExit(1)", indispensable=True)
    watched.attendant.start()
    await watched.until(lambda: watched.given_up)
    assert "5 times" in watched.given_up[0] and "no such module: aiohttp" in watched.given_up[0]
    await asyncio.sleep(0.1)
    assert len(watched.begun) == 5 and len(watched.given_up) == 1


async def test_one_that_can_be_done_without_is_started_again_and_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("supervisor.attendants.pause_after", lambda deaths: 0.01)
    watched = Watched(tmp_path, "raise SystemExit(1)")
    watched.attendant.start()
    await watched.until(lambda: len(watched.begun) >= 7)
    assert not watched.given_up
    await watched.attendant.leave(0.5)


async def test_one_that_cannot_even_be_started_counts_as_dead(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("supervisor.attendants.pause_after", lambda deaths: 0.01)
    watched = Watched(tmp_path, "", indispensable=True)
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    watched.attendant.start()
    await watched.until(lambda: watched.given_up)
    assert "could not be started" in watched.given_up[0]


async def test_it_runs_once_it_has_said_hello_and_the_janitor_without(tmp_path: Path) -> None:
    gateway, janitor = Watched(tmp_path, SLEEPS), Watched(tmp_path, SLEEPS, greets=False)
    for watched in (gateway, janitor):
        watched.attendant.start()
    assert gateway.attendant.status().state == "starting"
    assert janitor.attendant.status().state == "running"
    gateway.attendant.greeted()
    assert gateway.states[-1].state == "running"
    for watched in (gateway, janitor):
        await watched.attendant.leave(0.5)


async def test_one_that_never_says_hello_is_killed_and_replaced(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPS, hello_s=0.3)
    watched.attendant.start()
    await watched.until(lambda: len(watched.begun) == 2)
    assert any("nothing was heard" in line for line in watched.attendant._book.tail(5))
    await watched.attendant.leave(0.5)


async def test_one_that_falls_silent_is_replaced_and_one_that_speaks_is_not(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPS, beat_lost_s=1.5)
    watched.attendant.start()
    watched.attendant.greeted()
    for _ in range(20):
        watched.attendant.heard()
        await asyncio.sleep(0.1)
    assert len(watched.begun) == 1
    await watched.until(lambda: len(watched.begun) == 2)
    await watched.attendant.leave(0.5)


async def test_the_janitor_may_be_silent(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPS, greets=False, hello_s=0.05, beat_lost_s=0.05)
    watched.attendant.start()
    await asyncio.sleep(0.4)
    assert len(watched.begun) == 1
    await watched.attendant.leave(0.5)


async def test_a_dismissed_one_is_not_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPS)
    watched.attendant.start()
    watched.attendant.dismiss()
    assert watched.attendant.pid is not None
    psutil.Process(watched.attendant.pid).send_signal(signal.SIGTERM)
    assert await watched.attendant.gone(within_s=10)
    await asyncio.sleep(0.2)
    assert len(watched.begun) == 1
    assert watched.states[-1].state == "stopped"


async def test_one_that_was_about_to_be_started_again_is_not_once_dismissed(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "raise SystemExit(1)")
    watched.attendant.start()
    await watched.until(lambda: watched.lost)
    await watched.attendant.leave(0.5)
    await asyncio.sleep(0.2)
    assert len(watched.begun) == 1


@pytest.mark.parametrize(
    "code", [SLEEPS, "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"]
)
async def test_leaving_ends_it_whether_it_hears_sigterm_or_not(tmp_path: Path, code: str) -> None:
    watched = Watched(tmp_path, code)
    watched.attendant.start()
    if "SIG_IGN" in code:
        await watched.until(lambda: watched.attendant._book.tail(1))
    pid = watched.attendant.pid
    assert pid is not None
    await watched.attendant.leave(grace_s=0.3)
    assert not psutil.pid_exists(pid)
