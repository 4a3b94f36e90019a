"""Probabilities over HTTP: what the SDK reads, and what lm-eval asks for and adds up."""

import openai
import pytest

from tests.stands.equality import model_logprobs
from tests.stands.server import Server
from worker.text import Text

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"
CLOSE = 2e-3


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def loglikelihood(server: Server, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """As lm-eval's local-completions does it: one token more than wanted, the context's own scores and the last left out."""
    body = {"model": "smollm2", "prompt": [[*context, *continuation]], "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = server.post("/v1/completions", {**body, "temperature": 0, "seed": 1234})
    assert answer.status == 200, answer
    columns = answer.json()["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == len(context) + len(continuation) + 1
    scores = columns["token_logprobs"][len(context) : -1]
    tops = columns["top_logprobs"][len(context) : -1]
    tokens = columns["tokens"][len(context) : -1]
    return sum(scores), all(max(top, key=top.get) == token for top, token in zip(tops, tokens, strict=True))


def test_the_loglikelihood_of_a_continuation_is_the_models_own(real: Server, smollm2) -> None:
    text = Text.open(smollm2)
    context = text.encode_text("The capital of France is")
    for ending, is_likely in ((" Paris", True), (" a large purple fish", False)):
        continuation = text.encode_text(ending)
        rows = model_logprobs(smollm2, [*context, *continuation])
        expected = sum(rows[len(context) - 1 + i][token] for i, token in enumerate(continuation))
        total, is_greedy = loglikelihood(real, context, continuation)
        assert total == pytest.approx(float(expected), abs=CLOSE)
        assert is_greedy is is_likely


def test_an_echo_of_no_tokens_more_is_the_scored_prompt_alone(real: Server) -> None:
    fields = {"model": "smollm2", "prompt": "Paris is the capital of France", "logprobs": 1, "temperature": 0}
    alone = real.post("/v1/completions", {**fields, "echo": True, "max_tokens": 0}).json()
    longer = real.post("/v1/completions", {**fields, "echo": True, "max_tokens": 1}).json()
    count = alone["usage"]["prompt_tokens"]
    assert (alone["usage"]["completion_tokens"], alone["usage"]["total_tokens"]) == (0, count)
    choice = alone["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (fields["prompt"], "length")
    assert (
        choice["logprobs"]["tokens"] == longer["choices"][0]["logprobs"]["tokens"][:-1]
        and len(choice["logprobs"]["tokens"]) == count
    )
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        longer["choices"][0]["logprobs"]["token_logprobs"][1:-1], abs=CLOSE
    )
    refused = real.post("/v1/completions", {**fields, "max_tokens": 0})
    assert refused.status == 400 and "max_tokens 0 needs echo" in refused.error["message"]


def test_an_echo_repeats_the_prompt_and_its_offsets_fit_the_text(real: Server) -> None:
    fields = {
        "model": "smollm2",
        "prompt": "Café 🙂<|im_end|> au lait is",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 5,
        "temperature": 0,
    }
    answer = real.post("/v1/completions", fields)
    assert answer.text.startswith("Café 🙂<|im_end|> au lait is")
    columns = answer.json()["choices"][0]["logprobs"]
    assert columns["token_logprobs"][0] is None and all(value <= 0 for value in columns["token_logprobs"][1:])
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert answer.text[offset:].startswith(token)


def test_the_sdk_reads_the_tokens_of_a_chat_whole_and_streamed(real: Server) -> None:
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    whole = client(real).chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert all(entry.token == entry.top_logprobs[0].token for entry in content), "greedy takes the most likely"
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    streamed = []
    with client(real).chat.completions.stream(**asked, logprobs=True, top_logprobs=3) as stream:
        for event in stream:
            if event.type == "logprobs.content.delta":
                streamed += event.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_several_choices_share_the_prompt_and_differ(real: Server) -> None:
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12}
    whole = client(real).chat.completions.create(**asked, n=3, temperature=1.0, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    again: dict[int, str] = {}
    for chunk in client(real).chat.completions.create(**asked, n=3, temperature=1.0, seed=3, stream=True):
        for choice in chunk.choices:
            again[choice.index] = again.get(choice.index, "") + (choice.delta.content or "")
    assert [again[index] for index in range(3)] == texts


def test_min_tokens_and_ignore_eos_give_answers_of_a_set_length(real: Server) -> None:
    answer = real.chat("smollm2", QUESTION, max_tokens=40, min_tokens=40, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert answer.json()["choices"][0]["finish_reason"] == "length"
