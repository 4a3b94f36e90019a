"""Where a request's time went: in its answer, in the gateway's log, and by `omlxctl trace`, also while it runs."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.stands.models import tiny_model
from tests.stands.server import Server, running
from tests.system.test_system_faults import Stream

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tiny = tiny_model(tmp_path_factory.mktemp("long") / "tiny", max_position_embeddings=65_536)
    with running({"tiny": tiny}) as server:
        yield server


def traced(server: Server, rid: str) -> dict[str, object]:
    (request,) = json.loads(server.ctl("trace", rid, "--json").stdout)["requests"]
    return request


def lines(server: Server, rid: str) -> list[str]:
    log = "".join(path.read_text() for path in (server.home / "logs").glob("gateway*.log"))
    return [line for line in log.splitlines() if rid in line and "gateway.request" in line]


def the_line(server: Server, rid: str) -> str:
    """Lines reach the file by way of the supervisor."""
    server.wait_for(lambda: lines(server, rid), 20, f"a line about {rid}")
    (line,) = lines(server, rid)
    return line


def test_a_cold_request_says_how_long_it_waited_loaded_and_computed(server: Server) -> None:
    server.ctl("unload", "tiny")
    answer = server.chat("tiny", "secret words", system=LONG, max_tokens=20, timings=True)
    timings, rid = answer.json()["timings"], answer.headers["x-request-id"]
    assert timings["load_s"] > 0.2 and timings["prefill_s"] > 0 and timings["decode_s"] > 0
    assert timings["load_s"] < timings["first_token_s"] < timings["total_s"]
    assert (timings["cached_ram_tokens"], timings["cached_ssd_tokens"]) == (0, 0)
    steps = ("receive", "count", "queued", "load", "join", "prepare", "waiting", "restore", "prefill", "decode")
    assert sum(timings[f"{step}_s"] for step in steps) == pytest.approx(timings["total_s"], abs=1e-4), "nothing is left out"
    assert timings["decode_tokens_per_s"] == pytest.approx(19 / timings["decode_s"], rel=0.01)

    request = traced(server, rid)
    assert (request["model"], request["status"], request["is_over"]) == ("tiny", 200, True)
    (told,) = request["answers"]
    assert (told["outcome"], told["completion_tokens"]) == ("length", 20)
    order = list(dict.fromkeys(step["step"] for step in told["steps"]))
    assert order == [
        s for s in ("receive", "count", "queued", "load", "prepare", "waiting", "restore", "prefill", "decode") if s in order
    ]
    assert {"receive", "load", "prefill", "decode"} <= set(order)
    assert {"weights", "warm"} & {step["detail"] for step in told["steps"]}, "a load is shown stage by stage"
    assert sum(step["took_s"] for step in told["steps"]) == pytest.approx(request["timings"]["total_s"], abs=0.01)

    table = server.ctl("trace", rid).stdout
    assert "prefill" in table and "%" in table and "length" in table

    again = server.chat("tiny", "secret words", system=LONG, max_tokens=20, timings=True).json()
    assert again["timings"]["load_s"] == 0
    assert again["timings"]["cached_ram_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64

    line = the_line(server, rid)
    for part in ("POST /v1/chat/completions 200 length", "model=tiny", "answer=20", "load=", "decode_tps="):
        assert part in line
    assert "secret" not in line


def test_a_request_is_traced_while_it_runs_by_the_clients_name_and_after_its_worker_died(server: Server) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
    server.post("/v1/chat/completions", body, headers={"x-request-id": "mine-1"})
    assert traced(server, "mine-1")["client_id"] == "mine-1"

    stream = Stream(server, "tiny", "hello", max_tokens=60_000)
    stream.until_content()
    running = server.ctl("trace", "mine-1").stdout  # unharmed by what runs
    assert "mine-1" in running
    rid = json.loads(stream.event() or "")["id"]
    request = traced(server, rid)
    assert request["is_over"] is False and request["answers"][0]["outcome"] is None
    assert [step["step"] for step in request["answers"][0]["steps"]][-2:] == ["prefill", "decode"]
    assert "running" in server.ctl("trace", rid).stdout

    os.kill(server.pid_of("tiny"), signal.SIGKILL)
    stream.rest()
    server.wait_for(lambda: traced(server, rid)["is_over"], 10, "the request is over")
    request = traced(server, rid)
    assert request["answers"][0]["outcome"] == "worker_lost" and request["answers"][0]["completion_tokens"] > 0
    assert "worker_lost" in the_line(server, str(request["id"]))

    unknown = server.ctl("trace", "req_unheard_of", check=False)
    assert unknown.returncode == 4 and "req_unheard_of" in unknown.stderr


def test_the_sdk_passes_timings_on_and_streams_hold_them_once_at_the_end(server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as ai:
        extra = {"timings": True}
        whole = ai.chat.completions.create(**asked, extra_body=extra)
        assert whole.model_extra["timings"]["total_s"] > 0
        for stream_options in ({}, {"stream_options": {"include_usage": True}}):
            options: dict[str, Any] = stream_options
            chunks = list(ai.chat.completions.create(**asked, stream=True, extra_body=extra, **options))
            having = [at for at, chunk in enumerate(chunks) if "timings" in (chunk.model_extra or {})]
            assert having == [len(chunks) - 1]
            assert chunks[-1].model_extra["timings"]["decode_s"] > 0
        text = ai.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, n=2, extra_body=extra)
        assert len(text.choices) == 4 and text.model_extra["timings"]["first_token_s"] > 0
        assert "timings" not in ai.chat.completions.create(**asked).model_extra
        with pytest.raises(openai.BadRequestError, match="timings"):
            ai.chat.completions.create(**asked, extra_body={"timings": "yes"})


def test_a_client_that_leaves_and_a_request_that_is_refused_are_one_line_each(server: Server) -> None:
    refused = server.post("/v1/chat/completions", {"model": "none", "messages": MESSAGES}, headers={"x-request-id": "a\tb c"})
    line = the_line(server, refused.headers["x-request-id"])
    assert "(a?b?c) POST /v1/chat/completions 404 model_not_found total=" in line
    stream = Stream(server, "tiny", "hello", max_tokens=60_000)
    stream.until_content()
    rid = json.loads(stream.event() or "")["id"].removeprefix("chatcmpl-")
    stream.close()
    assert "cancelled" in the_line(server, rid)
