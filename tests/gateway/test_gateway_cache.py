"""The two cache routes: clearing goes through the supervisor, a probe through the model's worker and nothing else."""

from __future__ import annotations

import asyncio

from supervisor.protocol import Acquire, Call, Cancel, Release, Reply, Submit
from tests.gateway.stand import CHAT, Stand
from tests.stands.scripted_supervisor import slot
from tests.stands.scripted_worker import ScriptedWorker, hangs, refuses

PROBE = "/api/cache/probe"
CLEAR = "/api/ssd-cache/clear"
REPORT: dict[str, object] = {"deleted_files": {"block": 3, "bad": 1}, "deleted_bytes": 4096}


async def counts(worker: ScriptedWorker, submit: Submit) -> None:
    worker.result(submit, prompt_tokens=100, context=2048, hot=20, cold=64)


async def cleared(stand: Stand, answer: Reply | None = None, **body: object) -> tuple[int, dict[str, object], Call]:
    """Sends the request, answers the supervisor's call, returns status, body and the call."""
    post = asyncio.create_task(stand.http.post(CLEAR, json=body) if body else stand.http.post(CLEAR))
    [call] = await stand.supervisor.wait_for(Call)
    told = answer or Reply(id="", ok=True, result=REPORT)
    stand.supervisor.send(Reply(id=call.id, ok=told.ok, result=told.result, code=told.code, message=told.message))
    response = await post
    return response.status, await response.json(), call


async def test_clearing_without_a_body_clears_all_models(stand: Stand) -> None:
    await stand.start()
    status, body, call = await cleared(stand)
    assert (status, call.verb, call.args) == (200, "cache_clear", {"model": None})
    assert body == {"status": "ok", "model": None, "deleted_files": 4, "deleted_bytes": 4096}


async def test_one_model_can_be_cleared(stand: Stand) -> None:
    await stand.start()
    status, body, call = await cleared(stand, model="org/gone")  # its blocks may outlive it
    assert (status, body["model"], call.args) == (200, "org/gone", {"model": "org/gone"})


async def test_a_refusal_of_the_supervisor_is_an_error_body(stand: Stand) -> None:
    await stand.start()
    status, body, _ = await cleared(stand, Reply(id="", ok=False, code="busy", message="there is no janitor now"))
    assert (status, body["error"]["code"], body["error"]["message"]) == (429, "busy", "there is no janitor now")


async def test_clearing_takes_a_name_or_nothing(stand: Stand) -> None:
    await stand.start()
    async with stand.http.post(CLEAR, json={"model": 7}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "model"
    assert not stand.supervisor.all(Call)


async def test_both_routes_need_the_key(stand: Stand) -> None:
    await stand.start(settings={"api_key": "secret"})
    for path in (CLEAR, PROBE):
        async with stand.http.post(path, json=CHAT) as response:
            assert response.status == 401, path


async def test_a_probe_asks_the_worker_and_generates_nothing(stand: Stand) -> None:
    await stand.start(counts)
    async with stand.http.post(PROBE, json={**CHAT, "cache_salt": "mine"}) as response:
        assert response.status == 200
        assert await response.json() == {"model": "tiny", "prompt_tokens": 100, "hot": 20, "cold": 64, "missing": 16}
    [submit] = stand.worker.all(Submit)
    assert (submit.task, submit.want, submit.cache_salt) == ("count", ["cache"], "mine")
    assert submit.prompt.messages == CHAT["messages"]
    [release] = await stand.supervisor.wait_for(Release)
    assert release.outcome == "ok"


async def test_a_text_prompt_can_be_probed_too_but_one_at_a_time(stand: Stand) -> None:
    await stand.start(counts)
    async with stand.http.post(PROBE, json={"model": "tiny", "prompt": "hi"}) as response:
        assert (await response.json())["cold"] == 64
    assert stand.worker.all(Submit)[0].prompt.text == "hi"
    async with stand.http.post(PROBE, json={"model": "tiny", "prompt": ["a", "b"]}) as response:
        assert response.status == 400


async def test_no_model_is_loaded_for_a_probe(stand: Stand) -> None:
    await stand.start(models=[slot(state="idle")])
    async with stand.http.post(PROBE, json=CHAT) as response:
        assert response.status == 409
        error = (await response.json())["error"]
    assert error["code"] == "model_not_loaded" and "omlxctl load tiny" in error["message"]
    assert not stand.supervisor.all(Acquire)


async def test_a_wrong_probe_is_a_400_and_an_unknown_model_a_404(stand: Stand) -> None:
    await stand.start(refuses("context_length_exceeded", "too long"))
    for body, status in (({"model": "nope", "prompt": "x"}, 404), ({"model": "tiny"}, 400), (CHAT, 400)):
        async with stand.http.post(PROBE, json=body) as response:
            assert response.status == status, body


async def test_a_client_that_leaves_its_probe_gives_the_lease_back(stand: Stand) -> None:
    await stand.start(hangs)
    post = asyncio.create_task(stand.http.post(PROBE, json=CHAT))
    [submit] = await stand.worker.wait_for(Submit)
    post.cancel()
    await stand.worker.wait_for(Cancel)
    stand.worker.row(submit, finish="cancelled")
    assert [r.outcome for r in await stand.supervisor.wait_for(Release)] == ["cancelled"]


async def test_the_status_route_shows_the_warnings_of_the_moment(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.warnings = ["the prefix cache on disk is not in use"]
    async with stand.http.get("/api/status") as response:
        assert (await response.json())["warnings"] == stand.supervisor.warnings
