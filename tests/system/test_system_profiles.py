"""Profiles, templates and per-model settings from outside: the same for every way to load a model, and never a reload."""

import json
import shutil
from pathlib import Path

from tests.stands.server import Server, running
from tests.system.test_system_operate import configure

# Greedy, as the tiny model never ends then; a draw is the end once in 400 tokens.
TEMPLATES = {
    "model": {"profile_templates": {"brief": {"max_tokens": 3, "temperature": 0}}},
    "models": {"tiny": {"temperature": 0, "max_tokens": 9, "profiles": {"terse": "brief", "long": {"max_tokens": 12}}}},
}


def tokens(server: Server, model: str) -> object:
    answer = server.post("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "hello"}]})
    assert answer.status == 200, answer
    return answer.json()["usage"]["completion_tokens"]


def test_a_template_is_a_profile_of_every_model_and_can_be_given_another_name(tiny: Path) -> None:
    with running({"tiny": tiny, "other": tiny}, TEMPLATES) as server:
        assert [tokens(server, name) for name in ("tiny:terse", "tiny:brief", "tiny:long", "tiny")] == [3, 3, 12, 9]
        pid = server.pid_of("tiny")
        listed = [model["id"] for model in server.get("/v1/models").json()["data"]]
        assert listed == ["other", "other:brief", "tiny", "tiny:brief", "tiny:terse", "tiny:long"]
        assert ":brief, :terse, :long" in server.ctl("models").stdout
        assert tokens(server, "other:brief") == 3
        assert server.chat("other:terse", "hello").status == 404
        assert server.pid_of("tiny") == pid
        wrong = {"model": {"profile_templates": {"p": {"context": 64}}}, "models": {"tiny": {"profiles": {"q": "breif"}}}}
        (server.home / "settings.json").write_text(json.dumps(wrong))
        said = server.ctl("reload", check=False).stderr
        assert (
            "model.profile_templates.p.context: not of a request" in said
            and "models.tiny.profiles.q: there is no breif" in said
        )


def test_an_applied_profile_gives_the_defaults_at_once_and_for_good_by_the_same_worker(small: Server) -> None:
    configure(small, TEMPLATES)
    small.ctl("load", "tiny")
    pid = small.pid_of("tiny")
    assert small.ctl("apply", "tiny", "terse").stdout == "tiny has the defaults of tiny:terse\n"
    assert (tokens(small, "tiny"), tokens(small, "tiny:long")) == (3, 12)
    assert json.loads((small.home / "settings.json").read_text())["models"]["tiny"]["profile"] == "terse"
    shown = json.loads(small.ctl("models", "show", "tiny", "--json").stdout)
    assert shown["defaults"]["max_tokens"] == {"value": 3, "source": "applied profile"}
    assert ":terse*" in small.ctl("models").stdout
    applied = small.post("/v1/models/tiny:long/apply", {})
    assert applied.json() == {"status": "ok", "model_id": "tiny", "profile": "long"}
    assert tokens(small, "tiny") == 12
    assert small.post("/v1/models/tiny/apply", {"profile": None}).json()["profile"] is None
    assert tokens(small, "tiny") == 9
    assert "profile" not in json.loads((small.home / "settings.json").read_text())["models"]["tiny"]
    assert small.pid_of("tiny") == pid and small.model("tiny")["gen"] == 1
    for words, status in ((("tiny", "nope"), 4), (("tiny",), 2), (("nobody", "terse"), 4), (("tiny", "terse", "--none"), 2)):
        assert small.ctl("apply", *words, check=False).returncode == status, words
    assert small.post("/v1/models/tiny/apply", {"profile": "nope"}).status == 404
    assert small.post("/v1/models/tiny/apply", {"profile": 3}).status == 400
    small.ctl("apply", "tiny:brief")
    small.stop()
    assert "--none" not in small.ctl("apply", "tiny", "--none").stderr
    assert small.ctl("apply", "tiny", "breif", check=False).returncode == 2, "without a server the file is checked the same"
    small.ctl("apply", "tiny:long")
    small.start()
    assert tokens(small, "tiny") == 12


OWN = {
    "context": 300,
    "max_concurrent_requests": 3,
    "temperature": 0.9,
    "max_tokens": 7,
    "ttl_s": 500,
    "pinned": True,
    "hot_cache_max_size": "3MB",
    "chat_template_kwargs": {"mark": "fox " * 40},
}
CHANGING = (
    *("pid", "gen", "since", "last_used", "measured_bytes", "charged_bytes", "beat", "cache", "created"),
    "kv_granted_bytes",  # what a request was lent
)


def test_a_model_gets_the_same_settings_however_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    marked = shutil.copytree(tiny, tmp_path / "marked")
    config = json.loads((marked / "tokenizer_config.json").read_text())
    (marked / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": "{{ mark }}" + config["chat_template"]})
    )
    with running({"tiny": marked}, {"models": {"tiny": OWN}}) as server:
        ways = {
            "omlxctl": lambda: server.ctl("load", "tiny"),
            "http": lambda: server.post("/v1/models/tiny/load", {}),
            "request": lambda: server.chat("tiny", "hello", max_tokens=1),
        }
        seen: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {}
        for way, load in ways.items():
            load()
            server.wait_for(lambda: server.model("tiny")["leases"] == 0, 5, "nothing is held any more")
            assert server.model("tiny")["state"] == "ready", way
            told = {key: value for key, value in server.model("tiny").items() if key not in CHANGING}
            shown = json.loads(server.ctl("models", "show", "tiny", "--json").stdout)
            shown["capabilities"].pop("self_check", None)  # measured anew by every worker
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 5}
            answer = server.post("/v1/chat/completions", body).json()
            seen[way] = (told, {key: shown[key] for key in ("defaults", "capabilities")}, answer)
            too_long = server.chat("tiny", "x " * 400)
            assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded"), way
            assert server.post("/v1/models/tiny/unload", {}).json() == {"status": "ok", "model_id": "tiny"}
            assert server.model("tiny")["pid"] is None
        first = seen["omlxctl"]
        assert (first[0]["context"], first[0]["max_inflight"], first[0]["ttl_s"], first[0]["pinned"]) == (300, 3, 500, True)
        assert first[2]["usage"]["completion_tokens"] == 7 and first[2]["usage"]["prompt_tokens"] > 40
        for way, found in seen.items():
            assert found[0] == first[0], way
            assert found[1] == first[1], way
            assert found[2]["choices"] == first[2]["choices"], way
            assert found[2]["usage"]["prompt_tokens"] == first[2]["usage"]["prompt_tokens"], way


def test_a_model_whose_config_names_a_wrong_architecture_is_served_as_the_one_that_the_settings_name(
    tiny: Path, tmp_path: Path
) -> None:
    wrong = shutil.copytree(tiny, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "model_type": "lama", "architectures": ["LamaEncoder"]}))
    with running({"wrong": wrong, "tiny": tiny}) as server:
        assert "LamaEncoder is not a text generation model" in server.ctl("models").stderr
        server.ctl("config", "set", "models.wrong.model_type", "llama")
        answer = server.chat("wrong", "hello", max_tokens=4)
        assert answer.status == 200 and answer.text == server.chat("tiny", "hello", max_tokens=4).text
        server.ctl("config", "set", "models.tiny.draft_model", "wrong")
        helped = server.chat("tiny", "hello", max_tokens=20, timings=True)
        assert helped.status == 200 and helped.json()["timings"]["draft_accepted"] > 0, "also where it is another one's draft"
        server.ctl("config", "set", "models.wrong.model_type", "lama")
        refused = server.ctl("load", "wrong", check=False)
        assert refused.returncode != 0 and "lama" in refused.stderr
