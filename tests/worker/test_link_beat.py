"""The heartbeat goes on whatever becomes of one beat: a worker that stops beating is killed, with all that it is at."""

import asyncio
from typing import cast

import pytest

from supervisor.child import ChildArgs
from supervisor.protocol import Beat, Message
from worker import link
from worker.link import Link, Service


class Faltering:
    """Its second beat fails."""

    def beat(self, seq: int) -> Beat:
        if seq == 2:
            raise RuntimeError("asked at the wrong moment")
        return Beat(seq=seq, progress=0)


async def test_a_beat_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BEAT_EVERY_S", 0.001)
    loop, failures, said = asyncio.get_running_loop(), list[str](), list[Message]()
    loop.set_exception_handler(lambda _, context: failures.append(str(context.get("exception"))))
    of = Link(ChildArgs("", "w.0.1.0", "", -1, None))
    of._loop, of._over, of._service = loop, loop.create_future(), cast("Service", Faltering())
    monkeypatch.setattr(of, "_say", said.append)
    of._beat()
    async with asyncio.timeout(20):
        while len(said) < 3:
            await asyncio.sleep(0.001)
    of._end(0)
    of._context.term()
    assert [message.seq for message in said if isinstance(message, Beat)][:3] == [1, 3, 4]
    assert failures == ["asked at the wrong moment"]
