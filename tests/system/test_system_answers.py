"""The real model over HTTP: right answers, equal answers, the unmodified SDK."""

import json
import threading
from typing import Any

import openai
import pytest

from tests.stands.server import Server

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def ask(question: str) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}


def test_the_real_model_knows_the_capital_of_france(real: Server) -> None:
    answer = real.chat("smollm2", QUESTION)
    assert answer.status == 200
    assert "Paris" in answer.text


def test_a_stream_says_what_the_whole_answer_says(real: Server) -> None:
    whole = client(real).chat.completions.create(**ask(QUESTION))
    chunks = list(client(real).chat.completions.create(**ask(QUESTION), stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_sdk_reads_raw_responses_and_the_request_id(real: Server) -> None:
    raw = client(real).chat.completions.with_raw_response.create(**ask(QUESTION))
    assert raw.headers["x-request-id"].startswith("req_")
    assert "Paris" in raw.parse().choices[0].message.content


def test_four_prompts_at_once_each_equal_their_solo_answer(real: Server, smollm2) -> None:
    from tests.stands.equality import assert_same_greedy
    from worker.text import Text

    prompts = [
        "Name three colours of the rainbow and say which one you like best.",
        "Count from one to ten.",
        "Write one sentence about the sea, the moon and a small boat that is late for dinner.",
        "What is water made of?",
    ]
    alone = [real.chat("smollm2", prompt, max_tokens=24).text for prompt in prompts]
    together: dict[int, str] = {}

    def one(i: int) -> None:
        together[i] = real.chat("smollm2", prompts[i], max_tokens=24, cache_salt="apart").text

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = Text.open(smollm2)
    for i, prompt in enumerate(prompts):
        ids = text.encode_chat([{"role": "user", "content": prompt}])
        assert_same_greedy(smollm2, ids, alone[i], together[i])


def test_a_text_completion_continues_the_text(real: Server) -> None:
    answer = real.post(
        "/v1/completions", {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    assert answer.text.startswith(" Paris")


def test_a_stop_string_ends_the_answer_and_is_not_shown(real: Server) -> None:
    answer = real.chat("smollm2", QUESTION, stop=[" Paris"])
    assert answer.text == "The capital of France is"
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_text_and_another_another(real: Server) -> None:
    def with_seed(seed: int) -> str:
        return real.chat("smollm2", "Tell me a story.", temperature=1.0, seed=seed, max_tokens=16).text

    assert with_seed(7) == with_seed(7)
    assert len({with_seed(seed) for seed in (1, 2, 3)}) > 1


def test_the_model_list_shows_the_context_that_is_enforced(real: Server) -> None:
    listed = client(real).models.retrieve("smollm2")
    context = listed.model_dump()["max_input_tokens"]
    too_long = real.chat("smollm2", "word " * (context + 10))
    assert too_long.status == 400
    assert too_long.error["code"] == "context_length_exceeded"
    assert f"maximum context length is {context} tokens" in too_long.error["message"]
    assert json.dumps(too_long.error).count("token") >= 2
