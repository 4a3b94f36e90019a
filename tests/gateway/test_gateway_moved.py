"""Every part of a body that a client gives or takes is seen, and a handler that has ended leaves nothing behind on the loop."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from typing import cast

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.answer import answer
from gateway.body import json_object
from gateway.config import GatewayConfig
from gateway.desk import RECORD
from gateway.in_hand import STALLED_S, is_stalled
from gateway.inbox import Inbox, Output, Started
from gateway.link import Link
from gateway.openai_completions import CompletionChunks
from gateway.openai_sse import Envelope, UsageWanted
from gateway.records import Record, Records
from gateway.request import GenerateRequest
from gateway.stream import Pace, stream
from supervisor.protocol import Accepted, Piece, Prompt, Row, Sampling

LONG_AGO_S = 2 * STALLED_S
PATIENCE_S = 86_400
"""Longer than any timer of the server's own."""


class OneAnswer:
    """A link whose worker says one word and, a moment later, another, which is the last."""

    def start(self, record: Record, index: int, request: GenerateRequest, inbox: Inbox) -> None:
        accepted = Accepted(epoch="e", rid="r", prompt_tokens=1, max_tokens=2, cached_hot=0, cached_cold=0, position=0)
        inbox.put(Started(index, accepted))
        inbox.put(Output(index, Row(rid="r", seq=0, tokens=1, pieces=[Piece(text="Hel")])))
        last = Row(rid="r", seq=1, tokens=2, pieces=[Piece(text="lo")], finish="stop")
        asyncio.get_running_loop().call_later(0.05, inbox.put, Output(index, last))

    def leave(self, exchange: object) -> None:
        pass


async def test_a_body_and_a_stream_show_that_the_client_is_there_and_no_timer_stays() -> None:
    stalled: list[bool] = []
    inboxes: list[weakref.ref[Inbox]] = []
    records = Records()

    async def handler(request: web.Request) -> web.StreamResponse:
        record = request[RECORD] = records.begin("POST", "/v1/completions", "")
        record.received_at -= LONG_AGO_S
        stalled.append(is_stalled(record, time.monotonic()))
        await json_object(request, GatewayConfig())
        stalled.append(is_stalled(record, time.monotonic()))
        record.moved_at -= LONG_AGO_S
        asked = GenerateRequest(model="m", task="complete", prompt=Prompt(text="a"), sampling=Sampling())
        with answer(cast(Link, OneAnswer()), record, [asked]) as held:
            inboxes.append(weakref.ref(held.inbox))
            chunks = CompletionChunks(Envelope("1", "text_completion", 0, "m", "f"), UsageWanted(False, False), 1, [])
            response = await stream(request, held, chunks, Pace(PATIENCE_S, PATIENCE_S))
        stalled.append(is_stalled(record, time.monotonic()))
        return response

    app = web.Application()
    app.router.add_post("/", handler)
    async with TestClient(TestServer(app)) as client, client.post("/", data=json.dumps({})) as response:
        assert "lo" in await response.text()
    assert stalled == [True, False, False]
    gc.collect()
    assert [inbox() for inbox in inboxes] == [None], "a timer would hold it for a day"
