"""Two deaths with optional features: the next worker is started without, says so everywhere, and a reset brings them back."""

import json
import os
import signal
from pathlib import Path

from tests.stands.models import tiny_model
from tests.stands.server import Server, running

PROMPT = "The quick brown fox jumps over the lazy dog."


def ask(server: Server) -> str:
    body = {"model": "wide", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer
    return answer.text


def drafts(server: Server) -> bool:
    """Whether the worker has a draft model, as it says itself."""
    told = json.loads(server.ctl("models", "show", "wide", "--json").stdout)["capabilities"] or {}
    return told.get("draft_model") is not None


def test_after_two_deaths_a_model_goes_on_without_its_draft_and_its_bits_until_it_is_reset(tmp_path: Path) -> None:
    wide, small = tiny_model(tmp_path / "wide", head_dim=32), tiny_model(tmp_path / "small", num_hidden_layers=1)
    options = {"draft_model": str(small), "kv_bits": 8, "kv_group_size": 32}
    with running({"wide": wide}, {"models": {"wide": options}}) as server:
        for deaths in range(2):
            ask(server)
            assert drafts(server), f"after {deaths} deaths"
            os.kill(server.pid_of("wide"), signal.SIGKILL)
            server.wait_for(lambda n=deaths: server.model("wide")["restarts"] == n + 1, 10, "the death is noticed")
        ask(server)
        status = server.status()
        model = next(m for m in status["models"] if m["id"] == "wide")
        assert model["shed"] == ["draft_model", "kv_bits"]
        assert "died 2 times with draft_model and kv_bits" in model["last_error"]
        assert any("wide runs without draft_model and kv_bits" in warning for warning in status["warnings"])
        assert "died 2 times with draft_model and kv_bits" in server.said()
        assert not drafts(server) and "one request at a time" not in model["cache"]
        server.stop()
        server.start()
        ask(server)
        assert not drafts(server) and server.model("wide")["shed"] == ["draft_model", "kv_bits"], "a new server knows"
        assert any("wide runs without draft_model and kv_bits" in warning for warning in server.status()["warnings"])
        server.ctl("reset", "wide")
        ask(server)
        assert drafts(server) and server.model("wide")["shed"] == []
        assert not any("runs without" in warning for warning in server.status()["warnings"])
