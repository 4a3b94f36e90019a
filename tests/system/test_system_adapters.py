"""LoRA adapters served beside their base: own workers, own answers, own cache; the answers are those of mlx-lm."""

import json
from pathlib import Path

import pytest

from tests.stands.equality import greedy_ids
from tests.stands.server import Server, running
from tests.stands.tiny_adapter import tiny_adapter
from worker.text import Text

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
TOKENS = 12


def expected(base: Path, adapter: Path | None) -> str:
    """What mlx_lm says by itself."""
    from mlx_lm.utils import load_adapters, load_model

    text = Text.open(base)
    ids = text.encode_text(PROMPT)
    if adapter is None:
        return text.decode(greedy_ids(base, ids, TOKENS))
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model, _ = load_model(base)
    load_adapters(model, str(adapter))
    model.eval()
    return text.decode([int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS)])


def ask(server: Server, model: str) -> tuple[str, int]:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer
    assert answer.json()["model"] == model
    return answer.text, answer.cached_tokens


@pytest.fixture
def adapters(tmp_path: Path, tiny: Path) -> list[Path]:
    return [tiny_adapter(tmp_path / f"adapter{seed}", tiny, seed, named_base="org/tiny") for seed in (1, 2)]


def test_a_base_and_its_adapters_are_three_models_that_share_no_block(tiny: Path, adapters: list[Path]) -> None:
    one, other = adapters
    settings = {"models": {"tiny": {"adapters": {"one": str(one), "bad": "/nowhere"}}}}
    with running({"tiny": tiny, "other": other}, settings) as server:
        names = ["tiny", "tiny+one", "tiny+other"]
        answers = {name: ask(server, name) for name in names}
        assert [answers[name][1] for name in names] == [0, 0, 0], "a block of one was found by another"
        assert answers["tiny"][0] == expected(tiny, None)
        assert answers["tiny+one"][0] == expected(tiny, one)
        assert answers["tiny+other"][0] == expected(tiny, other)
        assert len({text for text, _ in answers.values()}) == 3
        assert len({server.pid_of(name) for name in names}) == 3
        assert all(ask(server, name)[1] > 0 for name in names), "each has its own"

        listed = {m["id"]: m for m in server.get("/v1/models").json()["data"]}
        assert (listed["tiny+one"]["parent"], listed["tiny"]["parent"]) == ("tiny", None)
        assert "tiny+bad" not in listed
        status = server.model("tiny+one")
        assert (status["base"], status["adapter"]) == ("tiny", str(one))
        assert status["weights_bytes"] > server.model("tiny")["weights_bytes"]
        assert "/nowhere" in server.model("tiny+bad")["problem"]
        shown = server.ctl("models").stdout
        assert "tiny+one" in shown and str(one) in shown
        assert server.chat("tiny+bad", "hello").status >= 400
        assert "adapter of" in server.ctl("models", "show", "tiny+one").stdout


def test_other_adapter_files_make_a_new_worker_and_a_clean_miss(tiny: Path, adapters: list[Path]) -> None:
    one, other = adapters
    with running({"tiny": tiny}, {"models": {"tiny": {"adapters": {"one": str(one)}}}}) as server:
        before, _ = ask(server, "tiny+one")
        pid = server.pid_of("tiny+one")
        (one / "adapters.safetensors").write_bytes((other / "adapters.safetensors").read_bytes())
        server.ctl("reload")
        after, cached = ask(server, "tiny+one")
        assert (after, cached) == (expected(tiny, other), 0)
        assert after != before and server.pid_of("tiny+one") != pid


def test_an_adapter_that_does_not_go_on_says_why_once_and_is_not_tried_again(tiny: Path, adapters: list[Path]) -> None:
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    config["lora_parameters"]["keys"] = ["mlp.up_proj"]
    (adapters[0] / "adapter_config.json").write_text(json.dumps(config))
    with running({"tiny": tiny}, {"models": {"tiny": {"adapters": {"one": str(adapters[0])}}}}) as server:
        answer = server.chat("tiny+one", "hello")
        assert answer.status == 400 and "cannot be put on this model" in answer.error["message"], answer
        assert server.model("tiny+one")["state"] == "failed"
