"""`kv_bits` from outside: other bits are clean misses without a crash, answers stay near, status and settings say so."""

import json
from pathlib import Path

import pytest

from tests.stands.models import tiny_model
from tests.stands.server import Server, running

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def ask(server: Server) -> tuple[float, int]:
    """How likely the answer's first token is, and what came from the cache."""
    body = {"model": "wide", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 1}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"][0], answer.cached_tokens


def settings(server: Server, **values: object) -> None:
    (server.home / "settings.json").write_text(json.dumps({"models": {"wide": values}}))


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "wide", head_dim=32)


def test_other_bits_are_clean_misses_also_after_a_restart_and_answers_stay_near(wide: Path) -> None:
    with running({"wide": wide}) as server:
        plain, _ = ask(server)
        estimate = server.model("wide")["estimate_bytes"]
        settings(server, kv_bits=8, kv_group_size=32)
        server.ctl("reload")
        eight, cached = ask(server)
        assert cached == 0 and abs(eight - plain) < 0.1
        assert server.model("wide")["estimate_bytes"] < estimate
        assert "one request at a time: mlx-lm cannot batch QuantizedKVCache" in server.model("wide")["cache"]
        server.stop()
        settings(server, kv_bits=4, kv_group_size=32)
        server.start()
        four, cached = ask(server)
        assert cached == 0 and four != eight
        assert ask(server) == (pytest.approx(four, abs=1e-4), pytest.approx(256, abs=64))
        assert server.model("wide")["restarts"] == 0


def test_bits_that_a_model_cannot_have_are_refused_with_the_key_and_the_reason(tiny: Path) -> None:
    with running({"tiny": tiny}, {"models": {"tiny": {"kv_bits": 4}}}) as server:
        answer = server.chat("tiny", "hello")
        assert answer.status == 400 and "kv_bits 4 with kv_group_size 64 cannot be used" in answer.error["message"], answer
