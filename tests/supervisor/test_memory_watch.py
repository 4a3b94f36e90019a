"""When the machine's memory is looked at."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.memory_watch import MemoryWatch
from supervisor.settings import Settings


async def wait_for(awaited: Any, limit_s: float) -> None:
    """As that of asyncio from Python 3.12 on: of what is there already, without a turn for anybody else."""
    async with asyncio.timeout(limit_s):
        await awaited


class Eager(MemoryWatch):
    """Each look takes long, and asks for the next; it gives up after many."""

    looks = 0

    def _look(self, now: float) -> None:
        self.looks += 1
        if self.looks == 100:
            raise asyncio.CancelledError
        self.look_soon()


async def test_looks_that_take_long_and_ask_for_the_next_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr("supervisor.memory_watch.SOON_S", 0.0)
    shell: Any = SimpleNamespace(
        budget=SimpleNamespace(total_bytes=1, tree_limit_bytes=0), loaded=SimpleNamespace(settings=Settings())
    )
    watch = Eager(shell)
    keeping = asyncio.create_task(watch.keep())
    for _ in range(5):
        await asyncio.sleep(0)
    assert 1 < watch.looks < 100
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
