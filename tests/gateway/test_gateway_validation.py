"""Wrong requests are refused by name and never reach the supervisor; the server goes on serving."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path

import pytest

from gateway.openai_fields import CHAT as CHAT_FIELDS
from gateway.openai_fields import COMPLETIONS as COMPLETION_FIELDS
from gateway.openai_fields import Fields
from supervisor.protocol import Acquire, Submit
from tests.gateway.stand import CHAT, Stand

USER = {"role": "user", "content": "hi"}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "openai-fields.md"

MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"12",
    b"\x00",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a\x00b"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud8"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b"[" * 100_000,
    b'{"model": "tiny"} trailing',
]

WRONG: list[tuple[dict[str, object], str, str]] = [
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
    ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "unsupported",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content", "unsupported"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": 4}, "model", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": "9"}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 10**40}, "seed", "invalid_value"),
    ({"stop": ["x"] * 21}, "stop", "invalid_value"),
    ({"stop": ""}, "stop[0]", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"logit_bias": {"word": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "invalid_type"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template_kwargs": {"n": 10**40}}, "chat_template_kwargs", "invalid_value"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"response_format": "json"}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "invalid_value"),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": {"maximum": 10**40}}, "guided_json", "invalid_value"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "invalid_value"),
    ({"guided_grammar": 7}, "guided_grammar", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"ignore_eos": "yes"}, "ignore_eos", "invalid_type"),
    ({"xtc_probability": 1.5}, "xtc_probability", "invalid_value"),
    ({"xtc_threshold": -0.1}, "xtc_threshold", "invalid_value"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported"),
    ({"prediction": {"type": "content"}}, "prediction", "unsupported"),
    ({"web_search_options": {}}, "web_search_options", "unsupported"),
    ({"thinking_budget": 100}, "thinking_budget", "unsupported"),
]

WRONG_COMPLETIONS: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [[]]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"suffix": "end"}, "suffix", "unsupported"),
    ({"best_of": 3}, "best_of", "unsupported"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"n": 17}, "n", "invalid_value"),
]

SYSTEMS = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "developer", "content": "c"}]
CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
    {"role": "tool", "content": None},
]
PARTS = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
FINE: list[dict[str, object]] = [
    {"tools": [], "tool_choice": None, "stop": None, "temperature": None, "n": 1, "logprobs": False, "stream": None},
    {"top_p": 0},
    {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": -2, "repetition_penalty": 1.1, "seed": -1},
    {"messages": [*SYSTEMS, USER, USER]},
    {"messages": [USER, *CALLS]},
    {"messages": [{"role": "user", "content": PARTS}]},
    {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": None, "structured_outputs": {}, "guided_json": None, "top_logprobs": 0, "xtc_threshold": 0.2},
    {"store": False, "user": "me", "metadata": {}, "service_tier": "auto", "prompt_cache_key": "k", "verbosity": "low"},
    {"logit_bias": {"5": -100, "7": 1.5}, "stop": [f"<{number}>" for number in range(20)]},
]


async def test_what_is_not_a_json_object_is_400(stand: Stand) -> None:
    await stand.start()
    for body in MALFORMED:
        for path in ("/v1/chat/completions", "/v1/completions"):
            async with stand.http.post(path, data=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (400, "invalid_request_error"), body[:60]
                assert set(error) == {"message", "type", "param", "code"}
    assert (await stand.chat())[0] == 200
    assert len(stand.supervisor.all(Acquire)) == 1


async def test_a_wrong_field_is_400_and_named(stand: Stand) -> None:
    await stand.start()
    for fields, param, code in WRONG:
        status, body = await stand.chat(**fields)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code), (fields, body)
        assert param.split("[")[0] in body["error"]["message"]
    for fields, param, code in WRONG_COMPLETIONS:
        async with stand.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, param, code), (fields, error)
    assert not stand.supervisor.all(Acquire)
    assert (await stand.chat())[0] == 200


async def test_fields_that_exclude_each_other_are_400_and_both_named(stand: Stand) -> None:
    await stand.start()
    status, body = await stand.chat(response_format={"type": "json_object"}, guided_regex="a")
    error = body["error"]
    assert isinstance(error, dict)
    assert (status, error["param"], error["code"]) == (400, None, "invalid_value")
    assert error["message"] == "Invalid request: response_format and guided_regex exclude each other."


async def test_a_missing_field_is_400_and_named(stand: Stand) -> None:
    await stand.start()
    bodies = {"messages": {"model": "tiny"}, "model": {"messages": [USER]}}
    for param, body in bodies.items():
        async with stand.http.post("/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, param, "missing_required_parameter")
    async with stand.http.post("/v1/completions", json={"model": "tiny"}) as response:
        assert (await response.json())["error"]["param"] == "prompt"


async def test_what_clients_really_send_is_taken(stand: Stand) -> None:
    await stand.start()
    for fields in FINE:
        async with stand.http.post("/v1/chat/completions", json={**CHAT, **fields}) as response:
            assert response.status == 200, (fields, await response.text())
            assert "x-omlxd-ignored" not in response.headers, fields


HALVES = {
    r"cut \ud83d\u2026": "cut \ufffd\u2026",
    r"\uDC00\ud83d\ud83d\ude00": "\ufffd\ufffd\U0001f600",
    r"\n\uD800": "\n\ufffd",
    r"\\ud83d\ude00 \\ud83d\ud83d\ude00": "\\ud83d\ufffd \\ud83d\U0001f600",
    r"\ud800 \\ud83d \\\ud83d": "\ufffd \\ud83d \\\ufffd",
    r"{\"a\": \"\\ud83d\"} \udfff": '{"a": "\\ud83d"} \ufffd',
}
"""JSON text with half an emoji, as agents that cut texts send it, and what it says."""


@pytest.mark.parametrize("sent", HALVES)
async def test_half_an_emoji_does_not_end_the_session_it_is_in(stand: Stand, sent: str) -> None:
    await stand.start()
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "{sent}"}}]}}'
    async with stand.http.post("/v1/chat/completions", data=body.encode()) as response:
        assert response.status == 200, await response.text()
    (submit,) = stand.worker.all(Submit)
    assert submit.prompt.messages == [{"role": "user", "content": HALVES[sent]}]


async def test_minus_one_token_is_as_many_as_there_is_room_for(stand: Stand) -> None:
    await stand.start()
    for fields in (
        {"max_tokens": -1},
        {"max_tokens": -1, "max_completion_tokens": -1},
        {"max_tokens": 7, "max_completion_tokens": -1},
    ):
        assert (await stand.chat(**fields))[0] == 200
    assert [submit.max_tokens for submit in stand.worker.all(Submit)] == [None, None, 7]


async def test_messages_reach_the_worker_as_the_template_needs_them(stand: Stand) -> None:
    await stand.start()
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "developer", "content": "rules", "name": None},
        {"role": "user", "content": parts, "secret": 1},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    await stand.chat(messages=messages, reasoning_effort="none", cache_salt="s", max_tokens=9, max_completion_tokens=5)
    (submit,) = stand.worker.all(Submit)
    assert submit.prompt.messages == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert submit.reasoning is not None and submit.reasoning.effort == "none" and submit.template_kwargs is None
    assert (submit.cache_salt, submit.max_tokens, submit.continue_final) == ("s", 5, False)


async def test_how_urgent_it_is_and_until_when_is_told_to_supervisor_and_worker(stand: Stand) -> None:
    await stand.start()
    assert (await stand.chat(priority="interactive", deadline_s=60))[0] == 200
    assert (await stand.chat(priority="batch"))[0] == 200
    first, second = stand.worker.all(Submit)
    assert (first.priority, second.priority, second.deadline_ms) == (1, -1, None)
    assert first.deadline_ms is not None and 50_000 < first.deadline_ms <= 60_000
    assert [acquire.priority for acquire in stand.supervisor.all(Acquire)] == [1, -1]
    assert stand.supervisor.all(Acquire)[0].deadline_ms is not None
    for wrong in ({"priority": 1}, {"priority": "high"}, {"deadline_s": 0}, {"deadline_s": "5"}):
        status, body = await stand.chat(**wrong)
        assert (status, body["error"]["param"]) == (400, *wrong)


async def test_an_assistant_message_can_be_continued(stand: Stand) -> None:
    await stand.start()
    begun = [USER, {"role": "assistant", "content": "Once upon"}]
    assert (await stand.chat(messages=begun, continue_final_message=True, add_generation_prompt=False))[0] == 200
    assert stand.worker.all(Submit)[0].continue_final
    assert (await stand.chat(messages=begun, continue_final_message=True, add_generation_prompt=True))[0] == 400
    assert (await stand.chat(continue_final_message=True))[0] == 400
    assert (await stand.chat(add_generation_prompt=False))[0] == 400
    assert (await stand.chat(add_generation_prompt=True))[0] == 200


async def test_an_unknown_model_is_404_without_asking_the_supervisor(stand: Stand) -> None:
    await stand.start()
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        async with stand.http.post(f"/v1/{path}", json={**body, "model": "org/none"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert "org/none" in error["message"]
    assert not stand.supervisor.all(Acquire)


async def test_an_unknown_field_is_ignored_named_and_counted(stand: Stand) -> None:
    await stand.start()
    for stream in (False, True):
        body = {**CHAT, "stream": stream, "mirostat": 2, "weird\r\nX-Evil: 1": 3}
        async with stand.http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-omlxd-ignored"] == "mirostat, weird??X-Evil??1"
            assert "X-Evil" not in response.headers
            await response.read()
    async with stand.http.get("/api/status") as response:
        assert (await response.json())["gateway"]["ignored_fields"]["mirostat"] == 2


async def test_the_body_is_json_whatever_the_content_type_says(stand: Stand) -> None:
    await stand.start()
    data = json.dumps(CHAT).encode()
    headers: list[dict[str, str]] = [{}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}]
    for extra in headers:
        async with stand.http.post("/v1/chat/completions", data=data, headers=extra) as response:
            assert response.status == 200
    for encoding, packed in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data))):
        async with stand.http.post("/v1/chat/completions", data=packed, headers={"Content-Encoding": encoding}) as response:
            assert response.status == 200, encoding
        async with stand.http.post("/v1/chat/completions", data=data, headers={"Content-Encoding": encoding}) as response:
            assert response.status == 400, encoding
        async with stand.http.post(
            "/v1/chat/completions", data=packed[:-9], headers={"Content-Encoding": encoding}
        ) as response:
            assert response.status == 400, encoding
    async with stand.http.post("/v1/chat/completions", data=data, headers={"Content-Encoding": "br"}) as response:
        assert response.status == 415


async def test_a_body_over_the_limit_is_413_also_when_it_unpacks_to_that(stand: Stand) -> None:
    await stand.start(settings={"max_body_bytes": 200_000, "text_limit_bytes": 100_000})
    big = json.dumps({**CHAT, "pad": [0] * 100_000}).encode()
    wordy = json.dumps({**CHAT, "messages": [{"role": "user", "content": "é" * 60_000}]}, ensure_ascii=False).encode()
    packed = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 50_000_000)
    requests: list[tuple[bytes, dict[str, str]]] = [(big, {}), (gzip.compress(big), packed), (wordy, {}), (bomb, packed)]
    for data, headers in requests:
        async with stand.http.post("/v1/chat/completions", data=data, headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "request_too_large"

    async def chunked() -> object:
        for _ in range(50):
            yield b" " * 10_000

    async with stand.http.post("/v1/chat/completions", data=chunked()) as response:
        assert response.status == 413
    assert (await stand.chat())[0] == 200


async def test_a_model_name_of_any_length_is_not_sent_back_whole(stand: Stand) -> None:
    await stand.start()
    status, body = await stand.chat(model="m" * 1_000_000)
    error = body["error"]
    assert (status, error["code"]) == (404, "model_not_found")
    assert len(error["message"]) < 400


@pytest.mark.parametrize(("path", "fields"), [("/v1/chat/completions", CHAT_FIELDS), ("/v1/completions", COMPLETION_FIELDS)])
def test_the_documentation_lists_the_same_fields(path: str, fields: Fields) -> None:
    (section,) = (part for part in DOCS.read_text().split("\n## ") if part.startswith(f"POST {path}\n"))
    lists = {part.split("\n")[0]: set(re.findall(r"^\| `(\w+)`", part, re.M)) for part in section.split("\n### ")[1:]}
    assert lists == {"Honoured": fields.honoured, "Harmless": fields.harmless, "Unsupported": set(fields.unsupported)}


def test_no_field_is_in_two_lists() -> None:
    for fields in (CHAT_FIELDS, COMPLETION_FIELDS):
        assert not fields.honoured & fields.harmless and not (fields.honoured | fields.harmless) & set(fields.unsupported)


def test_every_honoured_field_is_read_by_the_request_model() -> None:
    from gateway.openai_types import ChatRequest, CompletionRequest

    assert CHAT_FIELDS.honoured == set(ChatRequest.model_fields)
    assert COMPLETION_FIELDS.honoured == set(CompletionRequest.model_fields)
