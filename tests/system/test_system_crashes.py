"""A worker may die at any moment: who was sent nothing gets an answer, the others an error, and nobody has to help.

docs/faults.md has the table of which.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from supervisor.client import CallFailed
from tests.stands.looking import Looking
from tests.stands.patience import patient_s
from tests.stands.raw_stream import Stream
from tests.stands.server import Answer, Server, running

LONG = "What is the capital of France? " * 80
"""A second or more of prefill for the slow model."""
PROBE_S = 6.0
AT_ONCE_S = 2.0


@pytest.fixture(scope="module")
def damaged(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole files that do not fit each other: seen only by whoever loads them."""
    copy = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("damaged") / "damaged"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    return copy


@pytest.fixture(scope="module")
def server(tiny: Path, slow: Path, damaged: Path) -> Iterator[Server]:
    models = {"tiny": tiny, "slow": slow, "single": slow, "damaged": damaged}
    settings = {
        "timers": {"probe_after_s": PROBE_S},
        "models": {"single": {"max_concurrent_requests": 1}},
        "cache": {"enabled": False},  # a prefix from the cache would make the second try another case
    }
    with running(models, settings) as server:
        yield server


@pytest.fixture
def look(server: Server) -> Iterator[Looking]:
    with Looking(server) as look:
        yield look
        look.until_nothing_is_left()
        for model in ("tiny", "slow", "single"):
            look.call("reset", {"model": model})


def later(call) -> "Future[Answer]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def kill(look: Looking, model: str, how: signal.Signals = signal.SIGKILL) -> int:
    pid = look.model(model)["pid"]
    os.kill(pid, how)
    return pid


def story(server: Server, rid: str = "expected") -> Answer:
    messages = [{"role": "user", "content": "Tell me a long story."}]
    body = {"model": "slow", "messages": messages, "temperature": 0, "max_tokens": 60}
    return server.post("/v1/chat/completions", body, headers={"x-request-id": rid})


def is_decoded(look: Looking, rid: str) -> bool:
    """By its trace: a heartbeat comes once a second, and may come after the end."""
    try:
        (request,) = look.call("trace", {"rid": rid})["requests"]
    except CallFailed:
        return False  # not there yet
    return any(step["step"] == "decode" for answer in request["answers"] for step in answer["steps"])


# When it dies


def test_one_that_dies_idle_is_replaced_for_the_next_request(server: Server, look: Looking) -> None:
    first = server.chat("tiny", "hello", max_tokens=4)
    before = look.until("tiny", lambda m: m["leases"] == 0)
    kill(look, "tiny")
    shown = look.until("tiny", lambda m: m["state"] == "backoff")
    assert shown["restarts"] == before["restarts"] + 1 and "killed by signal 9" in shown["last_error"]
    assert server.chat("tiny", "hello", max_tokens=4).text == first.text
    assert look.model("tiny")["state"] == "ready"


def test_one_that_dies_while_it_loads_is_started_again_for_who_waits(server: Server, look: Looking) -> None:
    waiting = later(lambda: server.chat("slow", "hello", max_tokens=2))
    look.until("slow", lambda m: m["pid"] and m["state"] in ("spawning", "loading"))
    first = kill(look, "slow")
    assert waiting.result(patient_s(60)).status == 200
    assert look.model("slow")["pid"] != first and look.model("slow")["restarts"] == 1


def test_a_prompt_whose_worker_dies_in_prefill_is_answered_by_the_next_one(server: Server, look: Looking) -> None:
    expected = server.chat("slow", LONG, max_tokens=8).text
    stream = Stream(server, "slow", LONG, max_tokens=8)
    stream.until_accepted()
    assert look.model("slow")["leases"] == 1
    first = kill(look, "slow")
    assert stream.rest()[-1] == "[DONE]"
    assert stream.text == expected
    assert look.model("slow")["pid"] != first


def test_a_request_that_waits_in_a_worker_outlives_it_and_the_stream_before_it_ends_with_an_error(
    server: Server, look: Looking
) -> None:
    expected = server.chat("single", "hello", max_tokens=3).text
    stream = Stream(server, "single", "Tell me a long story.", max_tokens=1500)
    stream.until_content()
    behind = Stream(server, "single", "hello", max_tokens=3)
    look.until("single", lambda m: m["leases"] == 2)
    kill(look, "single")
    *rest, last = stream.rest()
    assert json.loads(last)["error"]["code"] == "worker_lost"
    assert not any(json.loads(event)["choices"][0]["finish_reason"] for event in rest)
    assert behind.rest()[-1] == "[DONE]" and behind.text == expected


def test_an_answer_that_is_sent_whole_is_begun_again_however_far_it_was(server: Server, look: Looking) -> None:
    expected = story(server).text
    asked = later(lambda: story(server, "far-1"))
    server.wait_for(lambda: is_decoded(look, "far-1"), 30, "it is on its way")
    kill(look, "slow")
    assert asked.result(patient_s(60)).text == expected


def test_one_that_somebody_ends_in_order_is_a_lost_one_too(server: Server, look: Looking) -> None:
    """The server does not shut down: nobody may be told so."""
    expected = story(server).text
    stream = Stream(server, "slow", "Tell me another story.", max_tokens=1500)
    stream.until_content()
    asked = later(lambda: story(server, "order-1"))
    server.wait_for(lambda: is_decoded(look, "order-1"), 30, "it is on its way")
    kill(look, "slow", signal.SIGTERM)
    assert look.call("ping") == {}, "the server lives"
    assert asked.result(patient_s(60)).text == expected
    assert json.loads(stream.rest()[-1])["error"]["code"] == "worker_lost"


# When it does so again and again


def test_five_rapid_kills_quarantine_the_model_while_others_serve(server: Server, look: Looking) -> None:
    other = Stream(server, "slow", "Tell me a long story.", max_tokens=400)
    other.until_content()
    for _ in range(5):
        refused = server.chat("tiny", "hello", max_tokens=2)
        if refused.status != 200:
            break
        kill(look, "tiny")
        look.until("tiny", lambda m: m["state"] in ("backoff", "failed"))
    asked = time.monotonic()
    refused = server.chat("tiny", "hello", max_tokens=2)
    assert time.monotonic() - asked < patient_s(AT_ONCE_S)
    assert (refused.status, refused.error["code"], refused.error["type"]) == (503, "model_failed", "server_error")
    assert "quarantined after 3 crashes" in refused.error["message"] and "omlxctl reset tiny" in refused.error["message"]
    headers = {name.lower(): value for name, value in refused.headers.items()}
    assert headers["x-should-retry"] == "false" and 1 <= int(headers["retry-after"]) <= PROBE_S
    shown = look.model("tiny")
    assert (shown["state"], shown["pid"], shown["charged_bytes"]) == ("failed", None, 0)
    assert "killed by signal 9" in shown["last_error"]
    assert "tiny: failed: the worker was killed by signal 9" in server.ctl("status").stderr
    assert other.rest()[-1] == "[DONE]"

    server.ctl("reset", "tiny")
    assert server.chat("tiny", "hello", max_tokens=2).status == 200


def test_a_quarantined_model_is_tried_once_after_a_while_and_once_only(server: Server, look: Looking) -> None:
    for _ in range(3):
        assert server.chat("tiny", "hello", max_tokens=2).status == 200
        kill(look, "tiny")
        failed = look.until("tiny", lambda m: m["state"] in ("backoff", "failed"))
    assert failed["state"] == "failed"
    time.sleep(PROBE_S + 0.2)
    assert server.chat("tiny", "hello", max_tokens=2).status == 200
    kill(look, "tiny")
    look.until("tiny", lambda m: m["state"] == "failed")
    assert server.chat("tiny", "hello", max_tokens=2).status == 503


# When it cannot load


def test_a_model_that_cannot_be_loaded_fails_at_once_with_the_reason_and_is_tried_when_its_files_change(
    server: Server, look: Looking, damaged: Path
) -> None:
    assert server.chat("tiny", "hello", max_tokens=2).status == 200
    for _ in range(2):  # the second is refused without another try
        refused = server.chat("damaged", "hello", max_tokens=2)
        assert (refused.status, refused.error["code"]) == (400, "model_unloadable")
        assert "shape" in refused.error["message"]
    shown = look.model("damaged")
    assert (shown["state"], shown["gen"], shown["pid"]) == ("failed", 1, None)
    assert "shape" in shown["last_error"]
    assert server.chat("tiny", "hello", max_tokens=2).status == 200

    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    server.ctl("reload")
    assert server.chat("damaged", "hello", max_tokens=2).status == 200


# When a request is what kills it


def test_only_the_request_that_dies_alone_is_refused_and_those_beside_it_are_answered(slow: Path) -> None:
    beside = ["Tell me a long story.", "How are you today?"]
    poison = "def main(): return"
    with running({"slow": slow}) as server, Looking(server) as look:
        expected = [server.chat("slow", content, max_tokens=60).text for content in beside]
        killer = later(lambda: server.chat("slow", poison, max_tokens=400))
        look.until("slow", lambda m: m["leases"] == 1)
        others = [later(lambda content=content: server.chat("slow", content, max_tokens=60)) for content in beside]
        look.until("slow", lambda m: m["leases"] == 3)
        first = kill(look, "slow")

        alone = look.until("slow", lambda m: m["state"] == "ready" and m["pid"] != first)
        assert (alone["leases"], alone["waiting"]) == (1, 2)
        kill(look, "slow")
        refused = killer.result(patient_s(60))
        assert (refused.status, refused.error["code"]) == (400, "poison")
        asked = time.monotonic()
        again = server.chat("slow", poison, max_tokens=400)
        assert (again.status, again.error["code"]) == (400, "poison") and time.monotonic() - asked < patient_s(AT_ONCE_S)
        assert [other.result(patient_s(60)).text for other in others] == expected
        server.ctl("reset", "slow")
        assert server.chat("slow", poison, max_tokens=2).status == 200
        look.until_nothing_is_left()
