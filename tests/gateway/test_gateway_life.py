"""The process itself: what it costs, and how it ends."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from supervisor.protocol import Cancel, GatewayBeat, Hello, Submit
from tests.gateway.stand import CHAT, Stand, payloads
from tests.stands.patience import patient_s
from tests.stands.scripted_worker import hangs

STREAM = {**CHAT, "stream": True}


def process(stand: Stand) -> psutil.Process:
    assert stand.supervisor.gateway is not None
    return psutil.Process(stand.supervisor.gateway.pid)


def cpu_s_of_its_server() -> float:
    """To start a Python with an HTTP server in it: the yardstick on a slow machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-c", "import aiohttp.web"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def test_it_starts_cheaply_and_idles_small(stand: Stand) -> None:
    await stand.start()
    used = process(stand).cpu_times()
    assert used.user + used.system < max(0.6, 3 * cpu_s_of_its_server())
    assert process(stand).memory_info().rss < 80e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_it_never_maps_mlx_or_a_tokenizer(stand: Stand) -> None:
    await stand.start()
    await stand.chat()
    mapped = {Path(mapping.path).name for mapping in process(stand).memory_maps()}  # a checkout may well be called omlxd
    assert not any(word in name for name in mapped for word in ("mlx", "tokenizers"))


async def test_idle_it_hardly_uses_the_cpu(stand: Stand) -> None:
    await stand.start()
    before = process(stand).cpu_times()
    await asyncio.sleep(3)
    after = process(stand).cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.06


async def test_it_says_who_it_is_and_keeps_reporting(stand: Stand) -> None:
    await stand.start(hangs)
    (hello,) = stand.supervisor.all(Hello)
    assert hello.pid == process(stand).pid
    async with stand.http.post("/v1/chat/completions", json=STREAM):
        count = len(stand.supervisor.all(GatewayBeat))
        beats = await stand.supervisor.wait_for(GatewayBeat, count + 2)
    assert beats[-1].inflight == 1


@pytest.mark.parametrize("how", ["stop", "sigterm"])
async def test_an_ordered_end_tells_every_client_first(stand: Stand, how: str) -> None:
    await stand.start(hangs)
    async with stand.http.post("/v1/chat/completions", json=STREAM) as streaming:
        whole = asyncio.create_task(stand.chat())
        await stand.worker.wait_for(Submit, 2)
        began = time.monotonic()
        if how == "stop":
            stand.supervisor.order_stop()
        else:
            stand.supervisor.signal_gateway(signal.SIGTERM)
        events = payloads(await streaming.text())
        status, body = await whole
    assert json.loads(events[-1])["error"]["code"] == "shutting_down" and "[DONE]" not in events
    assert status == 503 and body["error"]["code"] == "shutting_down"
    assert len(await stand.worker.wait_for(Cancel, 2)) == 2
    assert stand.supervisor.gateway is not None
    assert await asyncio.wait_for(stand.supervisor.gateway.wait(), 60) == 0
    assert time.monotonic() - began < patient_s(5)


async def test_when_the_supervisor_dies_streams_are_cut_not_ended(stand: Stand) -> None:
    await stand.start(hangs)
    async with stand.http.post("/v1/chat/completions", json=STREAM) as response:
        await response.content.readuntil(b"Once")
        stand.supervisor.cut_lifeline()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert stand.supervisor.gateway is not None
    assert await asyncio.wait_for(stand.supervisor.gateway.wait(), 60) != 0


async def test_ctrl_c_is_not_for_the_gateway(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.signal_gateway(signal.SIGINT)
    assert (await stand.chat())[0] == 200


async def test_a_default_of_the_wrong_type_is_our_fault_and_said_so(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.defaults = {"temperature": "warm"}
    status, body = await stand.chat()
    assert status == 500 and "temperature" in body["error"]["message"]
    assert await stand.supervisor.outcomes() == ["internal"]
