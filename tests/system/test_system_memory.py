"""KV memory as clients meet it: more is lent to a busy worker while there is some; a request beyond all of it is told so."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from supervisor.budget import load_bytes
from tests.stands.asked import Asked, until_it_runs
from tests.stands.equality import assert_same_greedy
from tests.stands.models import tiny_model
from tests.stands.server import Answer, Server, running

PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32


def ask(server: Server, tokens: int, max_tokens: int) -> Answer:
    return server.post(
        "/v1/completions", {"model": "tiny", "prompt": [20] * tokens, "max_tokens": max_tokens, "temperature": 0}
    )


def parks_and_resumes(server: Server) -> tuple[int, int]:
    """From the log: a worker that is idle while memory is short does not live to be asked."""
    said = (server.home / "logs" / "tiny.log").read_text()
    return said.count("is parked at token"), said.count("goes on at token")


def test_several_that_exceed_the_floor_run_together_on_what_is_lent_and_later_given_back(tmp_path: Path) -> None:
    settings = {"scheduler": {"kv_loan_s": 3}}
    with running({"tiny": tiny_model(tmp_path / "tiny")}, settings) as server, ThreadPoolExecutor(4) as pool:
        assert ask(server, 5, 1).status == 200
        before, granted_bytes = server.model("tiny")["charged_bytes"], server.model("tiny")["kv_granted_bytes"]
        answers = list(pool.map(lambda i: ask(server, 1000 + i, 900), range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        # Each claims 2304 tokens and as many for copies; the floor has room for twice the context of 2048.
        busy = server.model("tiny")
        assert busy["charged_bytes"] - before >= (2 * 2304 * 2 - 2 * 2048) * PER_TOKEN
        assert busy["kv_granted_bytes"] > granted_bytes
        server.wait_for(lambda: server.model("tiny")["kv_granted_bytes"] == granted_bytes, 15, "it is given back")
        lent_bytes = busy["kv_granted_bytes"] - granted_bytes
        assert server.model("tiny")["charged_bytes"] <= busy["charged_bytes"] - lent_bytes


def test_a_request_beyond_the_whole_budget_is_a_400_with_the_numbers(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=200_000)
    settings = {"memory": {"max_model_memory": "640MB"}, "cache": {"enabled": False}}
    with running({"tiny": model}, settings) as server:
        refused = ask(server, 60_000, 10)
        served = ask(server, 100, 2)
    assert (refused.status, refused.error["code"]) == (400, "kv_too_large")
    assert "60010 tokens" in str(refused.error["message"])
    assert served.status == 200


def test_answers_that_outgrow_all_the_kv_there_is_are_put_aside_and_end_as_if_alone(tmp_path: Path) -> None:
    """Of each, 1024 tokens are set aside when it is let in: two fit, and outgrow the floor when there is nothing to lend."""
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=3080, num_hidden_layers=1)
    weights_bytes = (model / "model.safetensors").stat().st_size
    budget_bytes = load_bytes(weights_bytes, PER_TOKEN // 2, 3080)
    settings = {"memory": {"max_model_memory": f"{budget_bytes >> 10}KB"}, "cache": {"hot_cache_max_size": "0"}}
    prompts = [[20 + seed] * 10 for seed in range(2)]
    with running({"tiny": model}, settings) as server, ThreadPoolExecutor(2) as pool:
        body = {"model": "tiny", "max_tokens": 1400, "temperature": 0}
        alone = [server.post("/v1/completions", {**body, "prompt": prompt}).text for prompt in prompts]
        answers = list(pool.map(lambda prompt: server.post("/v1/completions", {**body, "prompt": prompt}), prompts))
        said = parks_and_resumes(server)
    assert said == (1, 1)
    for prompt, expected, answer in zip(prompts, alone, answers, strict=True):
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 1400
        assert_same_greedy(model, prompt, expected, answer.text)


def test_while_memory_is_short_a_running_answer_is_put_aside_and_ends_as_if_alone(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", num_hidden_layers=12, max_position_embeddings=8192)
    prompt = [21] * 100
    with running({"tiny": model}) as server:
        alone = Asked(server, "tiny", prompt, 1000).wait()
        first = Asked(server, "tiny", [20] * 100, 5000)
        until_it_runs(server, first)
        second = Asked(server, "tiny", prompt, 1000)  # enough for a look at the memory to find it running
        until_it_runs(server, second)
        short = {"soft_threshold": 0.01, "hard_threshold": 0.01, "critical_threshold": 1}
        (server.home / "settings.json").write_text(json.dumps({"memory": short}))
        server.ctl("reload")
        server.wait_for(lambda: server.model("tiny")["beat"]["parked"] == 1, 30, "one is put aside")
        assert "1 put aside" in server.ctl("status").stdout
        assert not first.is_over() and not second.is_over()
        first.hang_up()
        second.wait()
        parks, resumes = parks_and_resumes(server)
        asked = re.findall(r"(\d+) MiB of KV were asked back", (server.home / "logs" / "tiny.log").read_text())
    assert parks == resumes >= 1
    assert max(map(int, asked)) > 0, "the worker is told how much is too much"
    assert (second.finish, second.error) == ("length", None)
    assert_same_greedy(model, prompt, alone.text, second.text)
