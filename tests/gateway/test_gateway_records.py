"""What the gateway itself keeps of a request: the steps before a worker has it, one log line, nothing that was said."""

from __future__ import annotations

import asyncio
import re

import pytest

from supervisor.protocol import Acquire, Code, Queued, Rejected, Submit, Trace, Traced
from tests.gateway.stand import CHAT, Stand, payloads
from tests.gateway.test_gateway_leases import OTHER_WORKER
from tests.stands.scripted_supervisor import slot
from tests.stands.scripted_worker import ScriptedWorker, says


async def traced(stand: Stand, rid: str) -> list[dict[str, object]]:
    count = len(stand.supervisor.all(Traced)) + 1
    stand.supervisor.send(Trace(call=str(count), rid=rid))
    return (await stand.supervisor.wait_for(Traced, count))[-1].requests


def steps(request: dict[str, object]) -> list[tuple[str, str]]:
    return [(step["step"], step["detail"]) for step in request["answers"][0]["steps"]]  # pyright: ignore


async def test_waiting_and_loading_are_told_apart_while_they_last(stand: Stand) -> None:
    await stand.start(models=[slot("tiny", state="loading", stage="weights")])
    stand.supervisor.on_acquire = lambda _: None
    headers = {"x-request-id": "mine"}
    asking = asyncio.ensure_future(stand.http.post("/v1/chat/completions", json=CHAT, headers=headers))
    (acquire,) = await stand.supervisor.wait_for(Acquire)
    for state in ("queued", "spawning", "loading"):
        stand.supervisor.send(Queued(rid=acquire.rid, position=1, state=state))
    (request,) = await traced(stand, "mine")
    assert steps(request) == [("receive", ""), ("queued", ""), ("load", "weights")]
    assert (request["is_over"], request["status"]) == (False, None)
    stand.supervisor.send(stand.supervisor.grant(acquire))
    assert (await asking).status == 200
    (request,) = await traced(stand, "mine")
    assert [step for step, _ in steps(request)] == ["receive", "queued", "load", "prepare", "waiting", "decode"]
    assert (request["is_over"], request["status"]) == (True, 200)


async def test_a_second_attempt_is_told(stand: Stand) -> None:
    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)

    await stand.start(dies)
    asking = asyncio.create_task(stand.chat())
    (submit,) = await stand.worker.wait_for(Submit)
    await stand.add_worker(OTHER_WORKER, says("Next"))
    stand.supervisor.on_acquire = lambda again: stand.supervisor.grant(again, OTHER_WORKER)
    stand.supervisor.lose(submit.rid)
    _, body = await asking
    (request,) = await traced(stand, str(body["id"]))
    assert request["answers"][0]["attempts"] == 2 and request["answers"][0]["outcome"] == "stop"  # pyright: ignore
    assert ("queued", "again, as the worker was lost") in steps(request)


async def test_every_request_is_one_line_with_its_outcome_and_without_what_was_said(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    await stand.start()
    said = {"messages": [{"role": "user", "content": "the pass phrase"}], "user": "the pass phrase"}
    headers = {"Authorization": "Bearer s3cret"}
    capfd.readouterr()
    ids = []
    for more in ({}, {"stream": True}, {"temperature": 9}):
        async with stand.http.post("/v1/chat/completions", json={**CHAT, **said, **more}, headers=headers) as response:
            await response.read()
            ids.append(response.headers["x-request-id"])
    stand.supervisor.on_acquire = lambda acquire: Rejected(rid=acquire.rid, code=Code.QUEUE_FULL, message="Full.")
    async with stand.http.post("/v1/chat/completions", json=CHAT) as response:
        ids.append(response.headers["x-request-id"])
    async with stand.http.get("/v1/models"):
        pass
    lines = re.findall(r"gateway.request: (.*)", capfd.readouterr().err)
    outcomes = ["200 stop model=tiny", "200 stop model=tiny", "400 invalid_value total", "429 queue_full model=tiny"]
    assert len(lines) == 4
    for line, rid, outcome in zip(lines, ids, outcomes, strict=True):
        assert line.startswith(f"{rid} POST /v1/chat/completions {outcome}")
        assert "pass" not in line and "s3cret" not in line and "total=" in line


async def test_what_still_runs_when_the_gateway_ends_is_in_the_log_as_well(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    async def endless(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "Once")

    await stand.start(endless)
    async with stand.streaming(b"Once") as response:
        capfd.readouterr()
        stand.supervisor.order_stop()
        assert "shutting_down" in payloads(await response.text())[-1]
    assert stand.supervisor.gateway is not None
    await asyncio.wait_for(stand.supervisor.gateway.wait(), 60)
    (line,) = re.findall(r"gateway.request: (.*)", capfd.readouterr().err)
    assert "200 shutting_down model=tiny" in line
