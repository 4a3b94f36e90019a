"""Several answers to one prompt, and what is reported about their tokens, in OpenAI's shapes."""

from __future__ import annotations

import json

import pytest

from supervisor.protocol import Cancel, Release, Submit
from tests.gateway.stand import Stand, payloads
from tests.stands.scripted_worker import ScriptedWorker


def entry(
    token: str, logprob: float | None, top: dict[str, float] | None = None, *, special: bool = False
) -> dict[str, object]:
    def named(text: str, value: float | None) -> dict[str, object]:
        raw = bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) if text.startswith("bytes:") else text.encode()
        return {"id": len(text), "token": text, "bytes": raw, "special": special, "logprob": value}

    return {**named(token, logprob), "top": [named(text, value) for text, value in (top or {}).items()]}


async def two_at_once(worker: ScriptedWorker, submit: Submit) -> None:
    worker.accept(submit)
    for word in ("a", "b"):
        for choice in range(submit.sampling.n or 1):
            worker.choice_row(submit, choice, f"{word}{choice} ")
    for choice in reversed(range(submit.sampling.n or 1)):
        worker.choice_row(submit, choice, "", finish="stop")


async def test_all_choices_are_answered_and_the_prompt_is_counted_once(stand: Stand) -> None:
    await stand.start(two_at_once)
    status, body = await stand.chat(n=3)
    assert status == 200
    choices = body["choices"]
    assert isinstance(choices, list)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (i, f"a{i} b{i} ", "stop") for i in range(3)
    ]
    usage = body["usage"]
    assert isinstance(usage, dict)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 9)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    (release,) = await stand.supervisor.wait_for(Release)
    assert (release.prompt_tokens, release.completion_tokens) == (7, 9)


async def test_choices_stream_side_by_side_each_with_its_role_and_its_end(stand: Stand) -> None:
    await stand.start(two_at_once)
    events = await stand.chat_stream(n=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last, done = events
    seen: dict[int, list[object]] = {0: [], 1: []}
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        seen[choice["index"]].append(choice["delta"].get("role") or choice["delta"].get("content") or choice["finish_reason"])
    assert seen == {i: ["assistant", f"a{i} ", f"b{i} ", "stop"] for i in range(2)}
    usage = json.loads(last)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 6) and done == "[DONE]"


async def test_each_prompt_of_a_completion_has_its_choices_one_after_the_other(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        for choice in (1, 0):
            worker.choice_row(submit, choice, f"{submit.prompt.text}{choice}", finish="length")

    await stand.start(script)
    async with stand.http.post("/v1/completions", json={"model": "tiny", "prompt": ["p", "q"], "n": 2}) as response:
        body = await response.json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "p0"), (1, "p1"), (2, "q0"), (3, "q1")]
    assert body["usage"]["prompt_tokens"] == 14


async def test_one_choice_that_fails_fails_the_request_and_cancels_the_others(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.choice_row(submit, 0, "fine")
        worker.choice_row(submit, 1, "", finish="error")
        await worker.cancelled(submit)
        worker.choice_row(submit, 0, "", finish="cancelled")

    await stand.start(script)
    status, body = await stand.chat(n=2)
    assert status == 500 and body["error"]
    await stand.worker.wait_for(Cancel)
    await stand.supervisor.wait_for(Release)


async def test_a_lease_is_held_until_the_last_choice_is_over(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.choice_row(submit, 0, "a", finish="stop")
        await worker.cancelled(submit)
        assert not stand.supervisor.all(Release)
        worker.choice_row(submit, 1, "", finish="cancelled")

    await stand.start(script)
    async with stand.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 2, "stream": True}) as response:
        await response.content.readuntil(b'"finish_reason":"stop"')
        response.close()
    await stand.worker.wait_for(Cancel)
    assert len(await stand.supervisor.wait_for(Release)) == 1


HALVES = [entry("bytes:\\xc3", -0.5, {"bytes:\\xc3": -0.5}), entry("bytes:\\xa9", -0.25, {"bytes:\\xa9": -0.25, "x": -3.0})]


async def scored(worker: ScriptedWorker, submit: Submit) -> None:
    worker.accept(submit)
    worker.choice_row(submit, 0, "Hi", logprobs=[entry("Hi", -0.1, {"Hi": -0.1, "Ho": -2.0})])
    worker.choice_row(submit, 0, "", logprobs=HALVES[:1])
    worker.choice_row(submit, 0, "é", logprobs=HALVES[1:], finish="length")


async def test_chat_reports_each_token_with_its_bytes_and_what_else_was_likely(stand: Stand) -> None:
    await stand.start(scored)
    _, body = await stand.chat(logprobs=True, top_logprobs=2)
    (choice,) = body["choices"]  # pyright: ignore[reportGeneralTypeIssues]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [(c["token"], c["logprob"], c["bytes"]) for c in content] == [
        ("Hi", -0.1, [72, 105]),
        ("bytes:\\xc3", -0.5, [0xC3]),
        ("bytes:\\xa9", -0.25, [0xA9]),
    ]
    assert content[0]["top_logprobs"] == [
        {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]},
        {"token": "Ho", "logprob": -2.0, "bytes": [72, 111]},
    ]
    (submit,) = stand.worker.all(Submit)
    assert submit.logprobs == 2 and submit.echo is False


async def test_a_chat_stream_reports_every_token_also_one_without_text(stand: Stand) -> None:
    await stand.start(scored)
    chunks = [json.loads(event) for event in (await stand.chat_stream(logprobs=True))[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    reported = [c["token"] for choice in choices if choice["logprobs"] for c in choice["logprobs"]["content"]]
    assert reported == ["Hi", "bytes:\\xc3", "bytes:\\xa9"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hié"
    assert stand.worker.all(Submit)[0].logprobs == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_report_columns_with_offsets_into_the_text(stand: Stand, streamed: bool) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        prompt = [entry("<s>", None, special=True), entry("Once", -1.0, {"Once": -1.0})]
        worker.choice_row(submit, 0, "Once upon", logprobs=[*prompt, entry(" upon", -0.5, {" a": -0.2})])
        worker.choice_row(submit, 0, "", logprobs=HALVES[:1])
        worker.choice_row(submit, 0, "é", logprobs=HALVES[1:])
        worker.choice_row(submit, 0, "", logprobs=[entry("</s>", -0.3, {"</s>": -0.3}, special=True)], finish="stop")

    await stand.start(script)
    fields = {"model": "tiny", "prompt": [[1, 5]], "echo": True, "logprobs": 1, "max_tokens": 9, "stream": streamed}
    async with stand.http.post("/v1/completions", json=fields) as response:
        if streamed:
            parts = [json.loads(event)["choices"][0] for event in payloads(await response.text())[:-1]]
        else:
            parts = (await response.json())["choices"]
    assert "".join(part["text"] for part in parts) == "Once uponé"
    columns = [part["logprobs"] for part in parts if part["logprobs"]]
    together = {name: [value for part in columns for value in part[name]] for name in columns[0]}
    assert together == {
        "tokens": ["<s>", "Once", " upon", "bytes:\\xc3", "bytes:\\xa9", "</s>"],
        "token_logprobs": [None, -1.0, -0.5, -0.5, -0.25, -0.3],
        "top_logprobs": [
            None,
            {"Once": -1.0},
            {" a": -0.2, " upon": -0.5},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xa9": -0.25, "x": -3.0},
            {"</s>": -0.3},
        ],
        "text_offset": [0, 0, 4, 9, 9, 10],
    }
    (submit,) = stand.worker.all(Submit)
    assert (submit.logprobs, submit.echo, submit.prompt.ids) == (1, True, [[1, 5]])


async def test_who_does_not_ask_is_told_nothing(stand: Stand) -> None:
    await stand.start(scored)
    _, body = await stand.chat()
    (choice,) = body["choices"]  # pyright: ignore[reportGeneralTypeIssues]
    assert choice["logprobs"] is None
    assert stand.worker.all(Submit)[0].logprobs is None


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
FORMATS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"type": "json_schema", "schema": SCHEMA}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"type": "json_schema", "schema": SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"type": "json_schema", "schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"type": "json_schema", "schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, {"type": "json_object"}),
    ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "regex": "a+"}),
    ({"structured_outputs": {"choice": ["x", "y"]}}, {"type": "choice", "choice": ["x", "y"]}),
    ({"structured_outputs": {"grammar": "start: /a/"}}, {"type": "grammar", "grammar": "start: /a/"}),
    ({"guided_json": SCHEMA}, {"type": "json_schema", "schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
    ({"guided_choice": ["x"]}, {"type": "choice", "choice": ["x"]}),
    ({"guided_grammar": "start: /a/"}, {"type": "grammar", "grammar": "start: /a/"}),
]


async def test_every_way_to_ask_for_a_format_reaches_the_worker_in_one_form(stand: Stand) -> None:
    await stand.start()
    for fields, _ in FORMATS:
        assert (await stand.chat(**fields))[0] == 200, fields
        async with stand.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields}) as response:
            assert response.status == 200
    got = [submit.response_format for submit in stand.worker.all(Submit)]
    assert got[::2] == got[1::2] == [wanted for _, wanted in FORMATS]
    schema = got[2]["schema"]  # pyright: ignore[reportOptionalSubscript]
    assert isinstance(schema, dict) and list(schema["properties"]) == ["b", "a"], "the order of a schema is that of the answer"


async def test_the_sampling_extensions_reach_the_worker(stand: Stand) -> None:
    await stand.start()
    asked = {"min_tokens": 3, "ignore_eos": True, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert (await stand.chat(**asked))[0] == 200
    (submit,) = stand.worker.all(Submit)
    assert {name: getattr(submit.sampling, name) for name in asked} == asked
