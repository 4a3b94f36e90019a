"""No answer goes on for ever: one that names no length ends by default, and one that names any ends at the limit."""

import json
from pathlib import Path

from tests.stands.server import Answer, running

SETTINGS = {"sampling": {"max_tokens": 30}, "models": {"capped": {"max_tokens_limit": 40}}}


def ended(answer: Answer) -> tuple[object, object]:
    body = answer.json()
    return body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]


def test_an_answer_ends_by_default_at_what_was_asked_for_or_at_the_limit(tiny: Path) -> None:
    """The tiny model never ends by itself."""
    with running({"free": tiny, "capped": tiny}, SETTINGS) as server:
        assert ended(server.chat("free", "go on")) == ("length", 30)
        assert ended(server.chat("free", "go on", max_tokens=60)) == ("length", 60)
        assert ended(server.chat("capped", "go on", max_tokens=60)) == ("length", 40)
        assert ended(server.chat("capped", "go on")) == ("length", 30)
        listed = {model["id"]: model["max_tokens"] for model in server.get("/v1/models").json()["data"]}
        assert listed == {"free": 30, "capped": 30}
        shown = json.loads(server.ctl("models", "show", "capped", "--json").stdout)["defaults"]
        assert shown["max_tokens_limit"] == {"value": 40, "source": "model settings"}

        (server.home / "settings.json").write_text('{"sampling": {"max_tokens_limit": 20}}')
        server.ctl("reload")
        assert ended(server.chat("free", "go on")) == ("length", 20)
        assert ended(server.chat("free", "go on", max_tokens=60)) == ("length", 20)
