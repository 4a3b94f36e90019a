"""What a handler waits for: updates, or its own patience."""

import asyncio
import gc
import weakref

from gateway.inbox import Inbox, Output
from supervisor.protocol import Piece, Row

ROW = Output(0, Row(rid="r", seq=0, tokens=1, pieces=[Piece(text="word")]))
LIMIT_S = 25.0


async def a_wait_that_is_answered(inbox: Inbox, patience_s: float) -> None:
    taken = asyncio.ensure_future(inbox.take(patience_s))
    await asyncio.sleep(0)
    inbox.put(ROW)
    assert await asyncio.wait_for(taken, LIMIT_S) == [ROW]


async def test_a_wait_lasts_its_own_time_though_an_earlier_one_would_be_over_sooner():
    inbox, loop = Inbox(), asyncio.get_running_loop()
    await a_wait_that_is_answered(inbox, 0.05)
    began = loop.time()
    assert await asyncio.wait_for(inbox.take(0.3), LIMIT_S) == []
    assert loop.time() - began >= 0.29


async def test_a_wait_ends_in_time_though_an_earlier_one_was_to_last_longer():
    inbox = Inbox()
    await a_wait_that_is_answered(inbox, 3600)
    assert await asyncio.wait_for(inbox.take(0.05), LIMIT_S) == []


async def test_a_wait_without_an_end_is_not_ended_by_an_earlier_ones_patience():
    inbox = Inbox()
    await a_wait_that_is_answered(inbox, 0.02)
    taken = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0.2)
    assert not taken.done()
    inbox.put(ROW)
    assert await asyncio.wait_for(taken, LIMIT_S) == [ROW]


async def test_a_wait_begun_after_an_earlier_ones_patience_has_rung_ends_too():
    inbox = Inbox()
    await a_wait_that_is_answered(inbox, 0.02)
    await asyncio.sleep(0.2)
    assert await asyncio.wait_for(inbox.take(0.05), LIMIT_S) == []


async def test_patience_that_is_over_at_once_ends_the_wait():
    inbox = Inbox()
    for patience_s in (0.0, 1e-9, 0.0004, 0.0):
        assert await asyncio.wait_for(inbox.take(patience_s), LIMIT_S) == []


async def test_a_closed_inbox_leaves_no_timer_behind():
    inbox = Inbox()
    held = weakref.ref(inbox)
    await a_wait_that_is_answered(inbox, 3600)
    inbox.close()
    del inbox
    gc.collect()
    assert held() is None, "a timer would hold it for an hour"
