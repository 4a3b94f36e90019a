"""POST /v1/completions: text and token prompts, one choice per prompt."""

from __future__ import annotations

import asyncio
import json

from supervisor.protocol import Release, Submit
from tests.gateway.stand import Stand, payloads
from tests.stands.scripted_worker import ScriptedWorker


async def echoes(worker: ScriptedWorker, submit: Submit) -> None:
    """Answers with its prompt, word by word; the later the prompt, the sooner."""
    worker.accept(submit)
    words = (submit.prompt.text or str(submit.prompt.ids)).split()
    for word in words:
        await asyncio.sleep(0.05 if words[0] == "slow" else 0)
        worker.row(submit, word + " ")
    worker.row(submit, finish="length")


async def complete(stand: Stand, **fields: object) -> dict[str, object]:
    async with stand.http.post("/v1/completions", json={"model": "tiny", **fields}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_a_prompt_is_completed(stand: Stand) -> None:
    await stand.start(echoes)
    body = await complete(stand, prompt="say this")
    assert body["object"] == "text_completion" and str(body["id"]).startswith("cmpl-")
    assert body["choices"] == [{"text": "say this ", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 7  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    (submit,) = stand.worker.all(Submit)
    assert submit.task == "complete" and submit.prompt.text == "say this" and submit.template_kwargs is None


async def test_several_prompts_are_several_choices_in_their_order(stand: Stand) -> None:
    await stand.start(echoes)
    body = await complete(stand, prompt=["slow one", "two", "three"])
    choices = body["choices"]
    assert isinstance(choices, list)
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "slow one "), (1, "two "), (2, "three ")]
    assert body["usage"]["prompt_tokens"] == 21  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    assert len(await stand.supervisor.wait_for(Release, 3)) == 3


async def test_token_ids_are_prompts_too(stand: Stand) -> None:
    await stand.start(echoes)
    await complete(stand, prompt=[1, 2, 3])
    await complete(stand, prompt=[[1, 2], [3]])
    assert [submit.prompt.ids for submit in stand.worker.all(Submit)] == [[[1, 2, 3]], [[1, 2]], [[3]]]


async def test_several_prompts_stream_side_by_side(stand: Stand) -> None:
    await stand.start(echoes)
    fields = {"model": "tiny", "prompt": ["slow one", "two"], "stream": True, "stream_options": {"include_usage": True}}
    async with stand.http.post("/v1/completions", json=fields) as response:
        *events, done = payloads(await response.text())
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]" and chunks[-1]["usage"]["prompt_tokens"] == 14
    texts = {0: "", 1: ""}
    finishes: dict[int, str] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert chunk["object"] == "text_completion" and choice["index"] not in finishes
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "slow one ", 1: "two "} and finishes == {0: "length", 1: "length"}


async def test_one_prompt_that_fails_fails_the_request_and_cancels_the_others(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        if submit.prompt.text == "bad":
            worker.problem(submit, "context_length_exceeded", "Too long.")
            return
        worker.accept(submit)
        await worker.cancelled(submit)
        worker.row(submit, finish="cancelled")

    await stand.start(script)
    for count, is_streamed in enumerate((False, True), 1):
        fields = {"model": "tiny", "prompt": ["good", "bad"], "stream": is_streamed}
        async with stand.http.post("/v1/completions", json=fields) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "prompt", "the field is called so here"
        outcomes = await stand.supervisor.outcomes(2 * count)
        assert sorted(outcomes) == ["cancelled"] * count + ["context_length_exceeded"] * count
