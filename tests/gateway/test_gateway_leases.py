"""Leases, cancels and retries: what a client's leaving or a worker's death does, and when the supervisor hears of it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from supervisor.protocol import OK, Abandon, Acquire, Cancel, Problem, Rejected, Release, Submit
from tests.gateway.stand import CHAT, Stand, payloads
from tests.stands.patience import patient_s
from tests.stands.scripted_supervisor import WORKER, slot
from tests.stands.scripted_worker import ScriptedWorker, hangs, refuses, says

OTHER_WORKER = "w.tiny.2.0"


async def leave_mid_answer(stand: Stand, *, stream: bool) -> Submit:
    """A client that sends a request and drops its connection once the worker has it."""
    async with aiohttp.ClientSession(stand.url) as session:
        asking = asyncio.create_task(session.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
        (submit,) = await stand.worker.wait_for(Submit)
        if stream:
            response = await asking
            await response.content.readuntil(b"Once")
            response.close()
        else:
            asking.cancel()
    return submit


async def test_release_carries_the_outcome_and_the_counts(stand: Stand) -> None:
    await stand.start(says("a", "b"))
    await stand.chat()
    (release,) = await stand.supervisor.wait_for(Release)
    assert (release.lease, release.outcome, release.prompt_tokens, release.completion_tokens) == ("lease1", OK, 7, 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(stand: Stand, stream: bool) -> None:
    await stand.start(hangs)
    submit = await leave_mid_answer(stand, stream=stream)
    (cancel,) = await stand.worker.wait_for(Cancel, timeout_s=patient_s(2))
    assert cancel.rid == submit.rid
    assert await stand.supervisor.outcomes() == ["cancelled"]


async def test_the_lease_is_held_until_the_worker_has_really_stopped(stand: Stand) -> None:
    may_stop = asyncio.Event()

    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "Once")
        await may_stop.wait()
        worker.row(submit, finish="cancelled")

    await stand.start(script)
    await leave_mid_answer(stand, stream=True)
    await stand.worker.wait_for(Cancel)
    await asyncio.sleep(0.3)
    assert not stand.supervisor.all(Release)
    may_stop.set()
    assert await stand.supervisor.outcomes() == ["cancelled"]


async def test_a_client_that_leaves_the_queue_abandons_its_place(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.on_acquire = lambda _: None
    async with aiohttp.ClientSession(stand.url) as session:
        asking = asyncio.create_task(session.post("/v1/chat/completions", json=CHAT))
        (acquire,) = await stand.supervisor.wait_for(Acquire)
        asking.cancel()
    (abandon,) = await stand.supervisor.wait_for(Abandon)
    assert abandon.rid == acquire.rid
    stand.supervisor.send(stand.supervisor.grant(acquire))  # was on its way already
    assert await stand.supervisor.outcomes() == ["cancelled"]
    assert not stand.worker.all(Submit)


@pytest.mark.parametrize(
    ("code", "status", "headers"),
    [
        ("queue_full", 429, {"Retry-After": "3"}),
        ("model_too_large", 400, {}),
        ("model_unloadable", 400, {}),
        ("poison", 400, {}),
        ("model_failed", 503, {"Retry-After": "3", "x-should-retry": "false"}),
        ("shutting_down", 503, {}),
        ("deadline", 504, {}),
        ("never_heard_of", 500, {}),
    ],
)
async def test_a_rejection_has_its_own_status(stand: Stand, code: str, status: int, headers: dict[str, str]) -> None:
    await stand.start()
    stand.supervisor.on_acquire = lambda acquire: Rejected(rid=acquire.rid, code=code, message="No.", retry_after_s=2.2)
    for stream in (False, True):
        async with stand.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == code
            assert {name: response.headers[name] for name in headers} == headers


async def test_a_request_whose_worker_dies_before_any_text_is_tried_once_more(stand: Stand) -> None:
    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        await asyncio.sleep(0.05)
        stand.supervisor.on_acquire = lambda acquire: stand.supervisor.grant(acquire, OTHER_WORKER)
        stand.supervisor.lose(submit.rid)

    await stand.start(dies)
    await stand.add_worker(OTHER_WORKER, says("Back"))
    *events, done = await stand.chat_stream()
    assert done == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events) == "Back"
    first, second = stand.supervisor.all(Acquire)
    assert first.request_hash == second.request_hash != ""
    assert first.rid != second.rid


async def test_it_is_not_tried_a_third_time(stand: Stand) -> None:
    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        stand.supervisor.lose(submit.rid)

    await stand.start(dies)

    def welcome_back(acquire: Acquire) -> object:
        worker = WORKER if not stand.supervisor.granted else OTHER_WORKER
        return stand.supervisor.grant(acquire, worker)

    await stand.add_worker(OTHER_WORKER, dies)
    stand.supervisor.on_acquire = welcome_back  # pyright: ignore[reportAttributeAccessIssue]
    status, body = await stand.chat()
    assert status == 503 and body["error"]["code"] == "worker_lost"
    assert len(stand.supervisor.all(Acquire)) == 2


@pytest.mark.parametrize("code", ["oom", "poison", "shutting_down"])
async def test_other_deaths_are_not_tried_again(stand: Stand, code: str) -> None:
    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        stand.supervisor.lose(submit.rid, code)

    await stand.start(dies)
    _, body = await stand.chat()
    assert body["error"]["code"] == code
    assert len(stand.supervisor.all(Acquire)) == 1


async def test_after_the_first_text_of_a_stream_a_lost_worker_is_the_clients_to_retry(stand: Stand) -> None:
    await stand.start(hangs)
    async with stand.streaming(b"Once") as response:
        (submit,) = stand.worker.all(Submit)
        stand.supervisor.lose(submit.rid)
        *_, last = payloads(await response.text())
    assert json.loads(last)["error"]["code"] == "worker_lost"
    assert len(stand.supervisor.all(Acquire)) == 1


async def test_a_whole_answer_begins_again_however_far_it_was(stand: Stand) -> None:
    """Nobody has seen any of it, also of the choice that was finished."""

    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.choice_row(submit, 0, "Lost", finish="stop")
        worker.choice_row(submit, 1, "Lost")
        await asyncio.sleep(0.1)
        stand.supervisor.on_acquire = lambda acquire: stand.supervisor.grant(acquire, OTHER_WORKER)
        stand.supervisor.lose(submit.rid)

    async def answers(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.choice_row(submit, 1, "B", finish="length")
        worker.choice_row(submit, 0, "A", finish="stop")

    await stand.start(dies)
    await stand.add_worker(OTHER_WORKER, answers)
    status, body = await stand.chat(n=2)
    assert status == 200
    assert [(c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [("A", "stop"), ("B", "length")]
    assert body["usage"]["completion_tokens"] == 2
    assert len(stand.supervisor.all(Acquire)) == 2


async def test_a_grant_for_a_worker_that_has_not_joined_yet_waits_for_it(stand: Stand) -> None:
    await stand.start(says("There"), join=False)
    asking = asyncio.create_task(stand.chat())
    await stand.supervisor.wait_for(Acquire)
    await asyncio.sleep(0.2)
    await stand.worker.join_until_welcome()
    status, body = await asking
    assert status == 200 and body["choices"][0]["message"]["content"] == "There"
    assert len(stand.supervisor.all(Acquire)) == 1


async def test_a_worker_that_is_gone_from_the_data_socket_is_reported_by_the_supervisor(stand: Stand) -> None:
    """The submit cannot be sent; the verdict comes over control.sock and the request goes to the successor."""
    await stand.start()
    await stand.worker.die()
    await asyncio.sleep(0.1)
    asking = asyncio.create_task(stand.chat())
    (acquire,) = await stand.supervisor.wait_for(Acquire)
    await stand.add_worker(OTHER_WORKER, says("Next"))
    stand.supervisor.on_acquire = lambda again: stand.supervisor.grant(again, OTHER_WORKER)
    stand.supervisor.lose(acquire.rid)
    status, body = await asking
    assert status == 200 and body["choices"][0]["message"]["content"] == "Next"


async def test_defaults_go_under_the_requests_own_fields(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.defaults = {
        "temperature": 0.6,
        "top_p": 0.9,
        "max_tokens": 50,
        "chat_template_kwargs": {"enable_thinking": True, "tone": "dry"},
        "not_for_us": 1,
    }
    await stand.chat(temperature=0, seed=5, chat_template_kwargs={"enable_thinking": False}, stop="END")
    (submit,) = stand.worker.all(Submit)
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.seed) == (0, 0.9, 5)
    assert submit.sampling.top_k is None and submit.max_tokens == 50 and submit.stop == ["END"]
    assert submit.template_kwargs == {"enable_thinking": False, "tone": "dry"}
    assert (submit.task, submit.lease, submit.epoch) == ("chat", "lease1", stand.worker.epochs[0])


async def test_messages_of_another_epoch_are_dropped(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.row(Submit(epoch="another", rid=submit.rid, task="chat", prompt=submit.prompt), "Ghost", seq=0)
        worker.accept(submit)
        worker.row(submit, "Real", seq=0)
        worker.row(submit, finish="stop")

    await stand.start(script)
    _, body = await stand.chat()
    assert body["choices"][0]["message"]["content"] == "Real"


async def test_a_worker_that_joins_again_is_welcomed_again_into_the_same_epoch(stand: Stand) -> None:
    await stand.start()
    await stand.worker.join_until_welcome()
    assert len(stand.worker.epochs) >= 2 and len(set(stand.worker.epochs)) == 1


async def test_a_new_gateway_has_a_new_epoch_and_serves_the_same_port_and_workers(stand: Stand) -> None:
    await stand.start()
    assert stand.supervisor.gateway is not None
    stand.supervisor.gateway.kill()
    await stand.supervisor.gateway.wait()
    await stand.supervisor.start_gateway()
    await stand.worker.join_until_welcome()
    status, _ = await stand.chat()
    assert status == 200
    assert stand.worker.epochs[0] != stand.worker.epochs[-1]


async def test_an_unknown_message_is_answered_so_that_the_peer_can_tell(stand: Stand) -> None:
    await stand.start()
    stand.worker.send_frames([b"from_the_future", b"\x80"])
    (problem,) = await stand.worker.wait_for(Problem)
    assert problem.code == "unknown_kind"


# ------------------------------------------------------------------ before a load


COLD = [slot(state="idle")]


async def counting(stand: Stand, script: object) -> ScriptedWorker:
    await stand.start(models=COLD)
    return await stand.add_worker("t.1", script, model="")  # pyright: ignore[reportArgumentType]


async def test_a_prompt_that_cannot_fit_is_refused_before_the_model_is_loaded(stand: Stand) -> None:
    text = await counting(stand, refuses("context_length_exceeded", "Too long: 9 > 8."))
    status, body = await stand.chat(chat_template_kwargs={"a": 1})
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert not stand.supervisor.all(Acquire)
    (submit,) = text.all(Submit)
    assert submit.task == "count" and submit.model is not None and submit.model.path == "/models/tiny"
    assert submit.template_kwargs == {"a": 1}


async def test_any_other_trouble_of_the_text_worker_does_not_stop_a_request(stand: Stand) -> None:
    await counting(stand, refuses("internal", "Cannot read the tokenizer."))
    status, _ = await stand.chat()
    assert status == 200


async def test_a_prompt_that_fits_goes_on_to_the_model(stand: Stand) -> None:
    async def count(worker: ScriptedWorker, submit: Submit) -> None:
        worker.result(submit, prompt_tokens=3, context=4096)

    await counting(stand, count)
    status, _ = await stand.chat()
    assert status == 200 and len(stand.supervisor.all(Acquire)) == 1


async def test_a_loaded_model_is_not_asked_about_beforehand(stand: Stand) -> None:
    text = await counting(stand, refuses("context_length_exceeded"))
    stand.supervisor.change("tiny", slot(state="ready"))
    await stand.until_status(200)  # until then it was asked, and refused
    text.received.clear()
    status, _ = await stand.chat()
    assert status == 200 and not text.all(Submit)


async def test_a_client_that_leaves_while_its_prompt_is_counted_loads_nothing(stand: Stand) -> None:
    text = await counting(stand, hangs)
    async with aiohttp.ClientSession(stand.url) as session:
        asking = asyncio.create_task(session.post("/v1/chat/completions", json=CHAT))
        (submit,) = await text.wait_for(Submit)
        asking.cancel()
    (cancel,) = await text.wait_for(Cancel)
    assert cancel.rid == submit.rid
    await asyncio.sleep(0.1)
    assert not stand.supervisor.all(Acquire)
