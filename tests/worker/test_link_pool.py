"""Requests between the socket and the engine, while the pool has others to prepare."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from supervisor.protocol import Prompt, Rows, Submit
from tests.stands.listener import Listener
from tests.stands.models import tiny_model
from worker import link_requests
from worker.engine import Engine
from worker.link_gateway import GatewayLink
from worker.link_requests import LoadedModel, ModelRequests, Prepared
from worker.text import Text


async def test_a_request_that_was_cancelled_while_the_pool_was_busy_is_never_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []

    def noted(model: LoadedModel, vocabulary: object, submit: Submit) -> Prepared:
        prepared.append(submit.rid)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr(link_requests, "prepare", noted)
    busy = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(busy.wait, 30)
        requests = ModelRequests(pool)
        requests.open(LoadedModel(Text.open(tiny_model(tmp_path / "tiny")), cast("Engine", None), 2048))
        listener = Listener()
        requests.submit(cast("GatewayLink", listener), Submit(epoch="e", rid="r", task="chat", prompt=Prompt(text="long")))
        requests.cancel("r")
        async with asyncio.timeout(20):
            while requests.unfinished:
                await asyncio.sleep(0.005)
        busy.set()
    assert prepared == []
    (last,) = listener.heard
    assert isinstance(last, Rows) and last.rows[0].finish == "cancelled"
