"""Who waits within a model's worker, as clients meet it: batch rows make way and go on, deadlines and bounds hold.

The server decodes one request at a time.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.stands.asked import Asked, until_it_runs
from tests.stands.equality import assert_same_greedy
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.server import Server, running

PROMPT = [20 + i % 300 for i in range(200)]
SHORT = [30, 31, 32]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "slow", num_hidden_layers=24, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(slow: Path) -> Iterator[Server]:
    with running({"slow": slow}, {"scheduler": {"max_concurrent_requests": 1, "max_queue": 2}}) as server:
        yield server


def beat(server: Server) -> Mapping[str, int]:
    return server.model("slow")["beat"]


def log(server: Server) -> str:
    return (server.home / "logs" / "slow.log").read_text()


def until_idle(server: Server) -> None:
    server.wait_for(lambda: server.model("slow")["leases"] == 0, 20, "nobody is served any more")


def test_a_batch_row_makes_way_for_an_urgent_request_and_goes_on_with_the_same_text(server: Server, slow: Path) -> None:
    alone = Asked(server, "slow", PROMPT, 300).wait()
    before = beat(server)
    batch = Asked(server, "slow", PROMPT, 300, priority="batch")
    until_it_runs(server, batch, 30)
    urgent = Asked(server, "slow", SHORT, 5, priority="interactive").wait()
    assert not batch.is_over() and urgent.finish == "length"
    batch.wait()
    until_idle(server)
    server.wait_for(lambda: beat(server)["resumes"] > before["resumes"], 5, "the worker says so")
    after = beat(server)
    assert (after["parks"] - before["parks"], after["resumes"] - before["resumes"], after["parked"]) == (1, 1, 0)
    assert (batch.finish, batch.error) == ("length", None)
    assert_same_greedy(slow, PROMPT, alone.text, batch.text)
    assert "is parked at token" in log(server)


def test_a_request_that_is_not_urgent_waits_its_turn(server: Server) -> None:
    before = beat(server)["parks"]
    first = Asked(server, "slow", PROMPT, 200)
    until_it_runs(server, first)
    assert Asked(server, "slow", SHORT, 2, priority="interactive").wait().finish == "length"
    by_then = first.pieces  # two threads read: which of them sees its end first is nobody's promise
    assert by_then > first.wait().pieces / 2 and first.finish == "length"
    until_idle(server)
    assert beat(server)["parks"] == before


def test_a_deadline_counts_while_a_request_waits(server: Server) -> None:
    first = Asked(server, "slow", PROMPT, 5000)
    until_it_runs(server, first)
    began = time.monotonic()
    refused = server.post("/v1/completions", {"model": "slow", "prompt": SHORT, "max_tokens": 2, "deadline_s": 0.5})
    streamed = Asked(server, "slow", SHORT, 2, deadline_s=0.5).wait()
    assert time.monotonic() - began < patient_s(8) and not first.is_over()
    assert (refused.status, refused.error["code"]) == (504, "deadline")
    assert streamed.error is not None and streamed.error["code"] == "deadline"
    first.hang_up()
    until_idle(server)


def test_a_deadline_counts_while_an_answer_is_put_aside(server: Server) -> None:
    parks = log(server).count("is parked at token")
    batch = Asked(server, "slow", PROMPT, 5000, priority="batch", deadline_s=6)
    until_it_runs(server, batch)
    urgent = Asked(server, "slow", SHORT, 5000, priority="interactive")
    until_it_runs(server, urgent)
    batch.wait()
    assert log(server).count("is parked at token") == parks + 1, "it was put aside"
    assert not urgent.is_over()
    assert batch.status == 200 and batch.error is not None and batch.error["code"] == "deadline"
    urgent.hang_up()
    until_idle(server)


def test_whoever_comes_to_a_full_line_is_told_so_at_once(server: Server) -> None:
    asked = [Asked(server, "slow", PROMPT, 5000)]
    until_it_runs(server, asked[0])
    asked += [Asked(server, "slow", SHORT, 2) for _ in range(2)]
    server.wait_for(lambda: server.model("slow")["leases"] == 3, 10, "three are taken")
    began = time.monotonic()
    refused = server.post("/v1/completions", {"model": "slow", "prompt": SHORT, "max_tokens": 2})
    assert time.monotonic() - began < patient_s(3) and not asked[0].is_over()
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    asked[0].hang_up()
    for one in asked[1:]:
        assert one.wait().finish == "length"
    until_idle(server)


def test_a_client_that_hangs_up_while_its_answer_is_put_aside_frees_its_place_and_leaves_its_blocks(server: Server) -> None:
    prompt = [40 + i % 200 for i in range(333)]
    batch = Asked(server, "slow", prompt, 5000, priority="batch")
    until_it_runs(server, batch)
    urgent = Asked(server, "slow", SHORT, 5000, priority="interactive")
    until_it_runs(server, urgent)
    server.wait_for(lambda: beat(server)["parked"] == 1, 5, "it is put aside")
    batch.hang_up()
    server.wait_for(lambda: server.model("slow")["leases"] == 1, 10, "its lease is released")
    server.wait_for(lambda: (beat(server)["waiting"], beat(server)["parked"]) == (0, 0), 5, "nothing waits")
    assert not urgent.is_over()
    urgent.hang_up()
    until_idle(server)
    again = server.post("/v1/completions", {"model": "slow", "prompt": prompt, "max_tokens": 1})
    assert again.cached_tokens >= 320
