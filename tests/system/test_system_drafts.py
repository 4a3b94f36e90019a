"""Draft models from outside: the answers are those without one, status counts what was accepted, what cannot be says why."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stands.models import tiny_model
from tests.stands.server import Answer, Server, running

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 30},
    "seeded": {"max_tokens": 30, "temperature": 0.9, "seed": 11, "top_p": 0.9},
    "penalties": {"max_tokens": 30, "presence_penalty": 1.0, "logit_bias": {"40": 3}},
    "logprobs": {"max_tokens": 10, "logprobs": True, "top_logprobs": 2},
    "two": {"max_tokens": 12, "n": 2, "temperature": 0.9, "seed": 3},
    "grammar": {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
}


def ask(server: Server, kind: str) -> Answer:
    answer = server.chat("tiny", PROMPT, **FIELDS[kind])
    assert answer.status == 200, (kind, answer)
    return answer


def said(answer: Answer) -> object:
    """All that a client reads but for rounding and the counts of the cache."""
    choices = answer.json()["choices"]
    logprobs = [[entry["token"] for entry in (choice.get("logprobs") or {"content": []})["content"]] for choice in choices]
    return (
        [[c["message"]["content"], c["finish_reason"]] for c in choices],
        logprobs,
        answer.json()["usage"]["completion_tokens"],
    )


def counts(server: Server) -> dict[str, int]:
    return server.model("tiny")["beat"]["draft"]


def test_every_kind_of_request_is_answered_as_without_a_draft_and_status_counts(tiny: Path, tmp_path: Path) -> None:
    same = tiny_model(tmp_path / "same")
    with running({"tiny": tiny}) as server:
        plain = {kind: said(ask(server, kind)) for kind in FIELDS}
        stop = plain["greedy"][0][0][0][8:12]
        stopped = said(server.chat("tiny", PROMPT, max_tokens=30, stop=[stop]))
        alone = server.model("tiny")
        (server.home / "settings.json").write_text(
            json.dumps({"models": {"tiny": {"draft_model": str(same), "num_draft_tokens": 4}}})
        )
        server.ctl("reload")
        server.ctl("load", "tiny")
        server.wait_for(lambda: counts(server) == {"proposed": 0, "accepted": 0}, 10, "a beat of the loaded model has come")
        first = ask(server, "greedy")
        assert said(first) == plain["greedy"]
        assert first.cached_tokens > 0, "the blocks are the model's own, with or without a draft"
        assert {kind: said(ask(server, kind)) for kind in FIELDS} == plain
        assert said(server.chat("tiny", PROMPT, max_tokens=30, stop=[stop])) == stopped
        server.wait_for(lambda: counts(server).get("accepted", 0) >= 60, 5, "status counts what was accepted")
        assert counts(server)["proposed"] >= counts(server)["accepted"]
        with_draft = server.model("tiny")
        assert with_draft["draft"] == str(same)
        assert with_draft["estimate_bytes"] - alone["estimate_bytes"] > alone["weights_bytes"]
        assert "a draft model works for one at a time" in with_draft["cache"]
        timings = server.chat("tiny", PROMPT, max_tokens=20, timings=True).json()["timings"]
        assert 10 <= timings["draft_accepted"] <= timings["draft_proposed"] <= 40
        assert "tokens accepted" in server.ctl("models", "show", "tiny").stdout

        to_block_end = -first.json()["usage"]["prompt_tokens"] % 64
        for tokens in (to_block_end - 2, to_block_end - 1):  # what is proposed beyond the end would fill a block
            assert server.chat("tiny", PROMPT, max_tokens=tokens).status == 200
        with pytest.raises(TimeoutError):
            server.post(
                "/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 1500, "temperature": 0}, timeout_s=0.2
            )
        server.wait_for(lambda: server.model("tiny")["beat"]["running"] == 0, 5, "nothing runs for nobody")
        assert said(ask(server, "greedy")) == plain["greedy"]


def test_drafts_that_cannot_be_used_are_named_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    reasons = {
        "nothing": "its draft_model nothing cannot be used: there is no model of that name",
        "of-tiny": "its draft_model of-tiny cannot be used: it is the model itself",
        "other": "draft_model other has another vocabulary: token",
        "windowed": "windowed cannot take tokens back, as layer",
    }
    models = {"other": other, "windowed": tiny_model(tmp_path / "windowed", "gemma3_text")}
    models |= {f"with-{draft}": tiny for draft in reasons}
    settings: dict[str, dict[str, object]] = {f"with-{draft}": {"draft_model": draft} for draft in reasons}
    settings["with-of-tiny"]["aliases"] = ["of-tiny"]
    with running(models, {"models": settings}) as server:
        for draft, reason in reasons.items():
            answer = server.chat(f"with-{draft}", "hello")
            problem = server.model(f"with-{draft}")["problem"]
            assert answer.status in (400, 404) and reason in f"{answer.error['message']} {problem}", answer
