"""What a chat stream looks like from outside, and when its status is decided."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest

from supervisor.protocol import Queued, Release, Submit
from tests.gateway.stand import CHAT, Stand, payloads
from tests.stands.scripted_worker import ScriptedWorker, hangs, refuses, says

STREAM = {**CHAT, "stream": True}
FILLER = b'"delta":{"content":""}'


async def test_a_stream_is_role_then_content_then_finish_then_done(stand: Stand) -> None:
    await stand.start(says("Hel", "lo"))
    *events, done = await stand.chat_stream()
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    same = [{key: chunk[key] for key in ("id", "object", "created", "model", "system_fingerprint")} for chunk in chunks]
    assert all(head == same[0] for head in same)
    assert same[0]["object"] == "chat.completion.chunk" and same[0]["id"].startswith("chatcmpl-")
    assert isinstance(same[0]["created"], int) and same[0]["model"] == "tiny"
    assert all("usage" not in chunk and chunk["choices"][0]["logprobs"] is None for chunk in chunks)


async def test_streamed_and_whole_answers_hold_the_same_text(stand: Stand) -> None:
    await stand.start(says("Grüße", " aus", " 東京", " 🎉"))
    events = [json.loads(event) for event in (await stand.chat_stream())[:-1]]
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    status, body = await stand.chat()
    assert status == 200
    assert body["choices"][0]["message"]["content"] == streamed == "Grüße aus 東京 🎉"


async def test_a_whole_answer_has_every_key_the_specification_requires(stand: Stand) -> None:
    await stand.start(says("Hello", finish="length"))
    _, body = await stand.chat()
    assert body["object"] == "chat.completion" and isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 1,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_usage_comes_once_and_only_when_asked_for(stand: Stand) -> None:
    await stand.start()
    *events, done = await stand.chat_stream(stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert chunks[-1]["object"] == "chat.completion.chunk"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_continuous_usage_counts_up_in_every_chunk(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "a")
        await has_read.wait()
        worker.row(submit, "b")
        worker.row(submit, "c")
        worker.row(submit, finish="stop")

    has_read = asyncio.Event()
    await stand.start(script)
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with stand.http.post("/v1/chat/completions", json={**STREAM, "stream_options": options}) as response:
        begun = (await response.content.readuntil(b'"content":"a"')) + await response.content.readuntil(b"\n\n")
        has_read.set()
        events = payloads((begun + await response.read()).decode())
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[1:-1]]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 3


async def test_reasoning_is_apart_from_the_answer(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "Hmm. ", kind="reasoning")
        worker.row(submit, "Yes.")
        worker.row(submit, finish="stop")

    await stand.start(script)
    _, body = await stand.chat()
    assert body["choices"][0]["message"]["reasoning_content"] == "Hmm. "
    assert body["choices"][0]["message"]["content"] == "Yes."
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await stand.chat_stream())[:-1]]
    assert {"reasoning_content": "Hmm. "} in deltas and {"content": "Yes."} in deltas


async def test_a_worker_that_refuses_before_the_stream_gives_a_real_status(stand: Stand) -> None:
    text = "This model's maximum context length is 4096 tokens. However, your messages resulted in 9000 tokens."
    await stand.start(refuses("context_length_exceeded", text))
    async with stand.http.post("/v1/chat/completions", json=STREAM) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error == {"message": text, "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    assert await stand.supervisor.outcomes() == ["context_length_exceeded"]


async def test_headers_come_with_acceptance_not_with_the_first_token(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        await may_go_on.wait()
        worker.row(submit, "late", finish="stop")

    may_go_on = asyncio.Event()
    await stand.start(script)
    async with stand.http.post("/v1/chat/completions", json=STREAM) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
        assert b'"role":"assistant"' in await response.content.readuntil(b"\n\n")
        may_go_on.set()
        assert b'"late"' in await response.content.readuntil(b"\n\n")


async def test_patience_sends_200_and_a_later_refusal_arrives_in_the_stream(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        await may_refuse.wait()
        worker.problem(submit, "context_length_exceeded", "Too long.")

    may_refuse = asyncio.Event()
    await stand.start(script, settings={"header_patience_s": 0.3})
    async with stand.http.post("/v1/chat/completions", json=STREAM) as response:
        assert response.status == 200
        may_refuse.set()
        *_, last = payloads(await response.text())
    assert json.loads(last)["error"]["code"] == "context_length_exceeded"
    status, _ = await stand.chat()  # a plain answer has no status to hurry for
    assert status == 400


async def test_patience_covers_the_wait_for_a_load(stand: Stand) -> None:
    await stand.start(settings={"header_patience_s": 0.3, "keepalive_s": 0.2})
    supervisor = stand.supervisor
    supervisor.on_acquire = lambda acquire: Queued(rid=acquire.rid, position=1, state="loading")
    async with stand.streaming(b'"role"') as response:
        for _ in range(2):
            assert FILLER in await response.content.readuntil(b"\n\n")
        granted = supervisor.grant(supervisor.all_acquired[-1])
        supervisor.granted.append(granted)
        supervisor.send(granted)
        events = payloads(await response.text())
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"


async def test_silence_is_filled_with_empty_chunks_of_the_same_stream(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "a")
        await has_waited.wait()
        worker.row(submit, "b")
        worker.row(submit, finish="stop")

    has_waited = asyncio.Event()
    await stand.start(script, settings={"keepalive_s": 0.3})
    begun = time.monotonic()
    async with stand.http.post("/v1/chat/completions", json=STREAM) as response:
        read = (await response.content.readuntil(FILLER)) + await response.content.readuntil(FILLER)
        has_waited.set()
        *events, done = payloads((read + await response.read()).decode())
    chunks = [json.loads(event) for event in events]
    fillers = [chunk for chunk in chunks if chunk["choices"][0]["delta"] == {"content": ""}]
    assert 2 <= len(fillers) <= (time.monotonic() - begun) / 0.3
    assert all(chunk["id"] == chunks[0]["id"] and chunk["model"] == "tiny" for chunk in fillers)
    assert [content for chunk in chunks if (content := chunk["choices"][0]["delta"].get("content"))] == ["a", "b"]
    assert done == "[DONE]"


async def test_fillers_can_be_turned_off_for_clients_that_stumble_over_them(stand: Stand) -> None:
    await stand.start(says("a", "b", gap_s=0.5), settings={"keepalive_s": 0})
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await stand.chat_stream())[:-1]]
    assert {"content": ""} not in deltas and "".join(delta.get("content", "") for delta in deltas) == "ab"


async def test_a_busy_stream_gets_no_filler(stand: Stand) -> None:
    await stand.start(says(*"abcdefghijkl", gap_s=0.25), settings={"keepalive_s": 2.5})
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await stand.chat_stream())[:-1]]
    assert {"content": ""} not in deltas


async def test_a_worker_that_dies_mid_stream_ends_it_with_an_error_and_nothing_else(stand: Stand) -> None:
    await stand.start(hangs)
    async with stand.streaming(b"Once") as response:
        (submit,) = stand.worker.all(Submit)
        stand.supervisor.lose(submit.rid)
        events = payloads(await response.text())
    error = json.loads(events[-1])["error"]
    assert error["code"] == "worker_lost" and set(error) == {"message", "type", "param", "code"}
    assert all(json.loads(event)["choices"][0]["delta"] == {"content": ""} for event in events[:-1]), "at most fillers"
    assert not stand.supervisor.all(Release)  # the lease was void


@pytest.mark.parametrize(("finish", "outcome"), [("cancelled", "cancelled"), ("error", "internal")])
async def test_a_cut_answer_is_never_shown_as_finished(stand: Stand, finish: str, outcome: str) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "Half a")
        await has_read.wait()
        worker.row(submit, finish=finish)

    has_read = asyncio.Event()
    await stand.start(script)
    async with stand.streaming(b"Half a") as response:
        has_read.set()
        events = payloads(await response.text())
    assert "error" in json.loads(events[-1]) and "[DONE]" not in events
    status, body = await stand.chat()
    assert status >= 500 and "choices" not in body
    assert await stand.supervisor.outcomes(2) == [outcome, outcome]


async def test_rows_that_got_lost_are_an_error_not_a_gap_in_the_text(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "one ")
        await has_read.wait()
        worker.row(submit, "three", seq=2)
        await worker.cancelled(submit)
        worker.row(submit, finish="cancelled")

    has_read = asyncio.Event()
    await stand.start(script)
    async with stand.streaming(b"one ") as response:
        has_read.set()
        events = payloads(await response.text())
    assert json.loads(events[-1])["error"]["code"] == "internal"
    assert await stand.supervisor.outcomes() == ["internal"]


async def test_text_that_arrives_together_is_written_together(stand: Stand) -> None:
    """Forty sequences' worth of rows must not become forty writes; here one request's rows pile up while nobody looks."""
    await stand.start(hangs)
    async with stand.streaming(b"Once") as response:
        (submit,) = stand.worker.all(Submit)
        stand.supervisor.signal_gateway(signal.SIGSTOP)
        for number in range(300):
            stand.worker.row(submit, f"{number} ")
        stand.worker.row(submit, finish="stop")
        stand.supervisor.signal_gateway(signal.SIGCONT)
        blocks = [block async for block, _ in response.content.iter_chunks()]
    assert b"299" in b"".join(blocks)
    assert len(blocks) < 150
