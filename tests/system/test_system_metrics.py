"""GET /metrics of a whole server: the numbers move with what a real model did."""

from pathlib import Path

from tests.stands.scraped import Scrape
from tests.stands.server import Server, running

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def scrape(server: Server) -> Scrape:
    answer = server.get("/metrics")
    assert answer.status == 200
    return Scrape(answer.body.decode())


def test_the_numbers_move_with_what_a_model_does(tiny: Path) -> None:
    with running({"tiny": tiny}) as server:
        before = scrape(server)
        assert before["omlxd_model_state", "tiny", "idle"] == 1
        assert not before.has("omlxd_worker_running", "tiny") and not before.has("omlxd_prompt_tokens_total", "tiny")
        assert all(before["omlxd_child_up", child] for child in ("gateway", "text", "janitor"))

        answers = [server.chat("tiny", PROMPT, max_tokens=8).json()["usage"] for _ in range(2)]
        asked, cached = (answers[1]["prompt_tokens"], answers[1]["prompt_tokens_details"]["cached_tokens"])
        server.wait_for(lambda: _of(server, "omlxd_cache_asked_tokens_total") == 2 * asked, 10, "a heartbeat")
        server.wait_for(lambda: _of(server, "omlxd_cache_written_bytes_total") > 0, 10, "blocks are on disk")
        after = scrape(server)
        assert after["omlxd_model_state", "tiny", "ready"] == 1
        assert after["omlxd_model_slow", "tiny"] == bool(server.model("tiny")["slow"])
        assert after["omlxd_memory_charged_bytes"] == after["omlxd_model_charged_bytes", "tiny"] > 0
        assert after["omlxd_prompt_tokens_total", "tiny"] == 2 * asked and after["omlxd_completion_tokens_total", "tiny"] == 16
        assert (
            after["omlxd_cached_tokens_total", "tiny", "ram"] == after["omlxd_cache_hit_tokens_total", "tiny", "ram"] == cached
        )
        assert cached > 0 and after["omlxd_worker_hot_bytes", "tiny"] > 0
        assert after["omlxd_requests_total", "/v1/chat/completions", "200", "length"] == 2
        for name in ("first_token_seconds", "token_seconds", "queue_seconds", "seconds"):
            assert after[f"omlxd_request_{name}_count", "tiny"] == 2
        assert after["omlxd_request_step_seconds_total", "tiny", "load"] > 0.1
        assert 0 < after["omlxd_request_token_seconds_sum", "tiny"] < after["omlxd_request_seconds_sum", "tiny"]
        assert after["omlxd_request_seconds_bucket", "tiny", "+Inf"] == 2

        server.ctl("unload", "tiny")
        server.wait_for(lambda: scrape(server)["omlxd_model_state", "tiny", "idle"] == 1, 5, "the gateway hears of it")
        assert scrape(server)["omlxd_prompt_tokens_total", "tiny"] == 2 * asked, "the gateway's counters outlive a worker"


def _of(server: Server, name: str) -> float:
    found = scrape(server)
    return found[name, "tiny"] if found.has(name, "tiny") else 0.0
