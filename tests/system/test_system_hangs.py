"""A process that lives but does nothing any more: noticed by its silence or by its standing still, ended and replaced."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stands.frozen import busiest_thread, freeze
from tests.stands.looking import Looking
from tests.stands.patience import patient_s
from tests.stands.raw_stream import Stream
from tests.stands.server import Server, running

BEAT_LOST_S, NO_PROGRESS_S, STOP_S, TERM_S = 5.0, 6.0, 1.0, 1.0
SLACK_S = 10.0
LONG = "What is the capital of France? " * 100
"""A second of prefill for the slow model, or more."""


@pytest.fixture(scope="module")
def server(tiny: Path, slow: Path) -> Iterator[Server]:
    timers = {"beat_lost_s": BEAT_LOST_S, "no_progress_s": NO_PROGRESS_S, "stop_s": STOP_S, "term_s": TERM_S}
    with running({"tiny": tiny, "slow": slow}, {"timers": timers}) as server:
        yield server


@pytest.fixture
def look(server: Server) -> Iterator[Looking]:
    with Looking(server) as look:
        yield look
        look.until_nothing_is_left()
        for model in ("tiny", "slow"):
            look.call("reset", {"model": model})


def test_a_worker_that_is_stopped_is_noticed_and_replaced(server: Server, look: Looking) -> None:
    stream = Stream(server, "slow", "Tell me a long story.", max_tokens=1500)
    stream.until_content()
    first = look.model("slow")["pid"]
    os.kill(first, signal.SIGSTOP)
    behind = Stream(server, "slow", "hello", max_tokens=2)  # nothing was sent for it yet
    assert server.chat("tiny", "hello", max_tokens=2).status == 200
    *_, last = stream.rest()
    assert json.loads(last)["error"]["code"] == "worker_lost"
    assert f"heartbeat lost for {BEAT_LOST_S:g} s" in json.loads(last)["error"]["message"]
    assert behind.rest()[-1] == "[DONE]"
    shown = look.until("slow", lambda m: m["leases"] == 0)
    assert shown["pid"] != first and shown["restarts"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="stops one thread by tracing it")
def test_an_engine_that_hangs_while_its_process_lives_leaves_its_stacks_and_is_replaced(server: Server, look: Looking) -> None:
    """The thread that computes stands still, as in a driver; the prompt it stood in is answered by the next worker."""
    assert server.chat("slow", "hello", max_tokens=2).status == 200
    before = look.until("slow", lambda m: m["beat"] and m["leases"] == 0)
    stream = Stream(server, "slow", LONG, max_tokens=4)
    stream.until_accepted()
    try:
        frozen = freeze(busiest_thread(before["pid"]))
    except OSError as e:
        pytest.skip(str(e))
    stood = look.model("slow")["beat"]["seq"]
    look.until("slow", lambda m: m["pid"] == before["pid"] and m["beat"]["seq"] > stood, NO_PROGRESS_S)
    assert not stream.text
    shown = look.until("slow", lambda m: m["pid"] != before["pid"], NO_PROGRESS_S + SLACK_S)
    assert f"no progress for {NO_PROGRESS_S:g} s with work queued" in shown["last_error"]
    assert shown["restarts"] == before["restarts"] + 1
    assert "most recent call first" in server.ctl("logs", "slow").stdout
    assert stream.rest()[-1] == "[DONE]"
    frozen.join(timeout=SLACK_S)
    assert not frozen.is_alive()


def test_a_worker_that_obeys_neither_a_message_nor_sigterm_is_killed_in_time(server: Server, look: Looking) -> None:
    server.ctl("load", "tiny")
    worker = look.model("tiny")["pid"]
    os.kill(worker, signal.SIGSTOP)  # signals wait with everything else
    begun = time.monotonic()
    server.ctl("unload", "tiny")
    assert time.monotonic() - begun < patient_s(STOP_S + TERM_S + SLACK_S)
    assert not Path(f"/proc/{worker}").exists() or sys.platform != "linux"
    shown = look.model("tiny")
    assert (shown["state"], shown["pid"], shown["charged_bytes"], shown["restarts"]) == ("idle", None, 0, 0)
    assert f"SIGTERM to worker {worker}" in server.said() and f"SIGKILL to worker {worker}" in server.said()


def test_a_stopped_text_worker_costs_a_cold_request_seconds_and_is_replaced(server: Server, look: Looking) -> None:
    look.call("unload", {"model": "tiny"}, timeout_s=None)
    first = look.child("text")["pid"]
    os.kill(first, signal.SIGSTOP)
    assert server.chat("tiny", "hello", max_tokens=2).status == 200
    server.wait_for(lambda: look.child("text")["pid"] not in (None, first), BEAT_LOST_S + SLACK_S, "another text worker")
    server.wait_for(lambda: look.child("text")["state"] == "running", SLACK_S, "which runs")
