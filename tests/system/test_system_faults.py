"""Any process may die at any moment: nothing hangs, the others go on, the client hears of it properly."""

import json
import os
import signal
import socket
import subprocess
import time

import psutil

from tests.stands.raw_stream import Stream
from tests.stands.server import OMLXCTL, Server, home_with


def test_a_stream_whose_worker_is_killed_ends_with_an_error_and_the_next_request_restores(small: Server) -> None:
    system = "The quick brown fox jumps over the lazy dog. " * 30
    first = small.chat("tiny", "hello", system=system, max_tokens=4)
    worker = small.pid_of("tiny")
    stream = Stream(small, "tiny", "hello", max_tokens=1500)
    stream.until_content()
    os.kill(worker, signal.SIGKILL)
    rest = stream.rest()
    assert "[DONE]" not in rest
    assert json.loads(rest[-1])["error"]["code"] == "worker_lost"
    assert not any(json.loads(e).get("choices", [{}])[0].get("finish_reason") for e in rest[:-1])
    again = small.chat("tiny", "hello", system=system, max_tokens=4)
    assert again.status == 200
    assert again.cached_tokens >= 64
    assert again.text == first.text


def test_a_killed_gateway_comes_back_within_three_seconds_and_models_stay_loaded(small: Server) -> None:
    small.chat("tiny", "hello", max_tokens=2)
    worker = small.pid_of("tiny")
    os.kill(small.pid_of("gateway"), signal.SIGKILL)
    killed = time.monotonic()
    answer = small.chat("tiny", "hello", max_tokens=2)
    assert answer.status == 200
    assert time.monotonic() - killed < 3.0
    assert small.pid_of("tiny") == worker


def test_a_stream_through_a_killed_gateway_is_aborted_not_ended_cleanly(small: Server) -> None:
    small.ctl("load", "tiny")
    gateway = small.pid_of("gateway")
    stream = Stream(small, "tiny", "hello", max_tokens=1500)
    stream.until_content()
    os.kill(gateway, signal.SIGKILL)
    assert "[DONE]" not in stream.rest()
    small.wait_for(lambda: small.model("tiny")["leases"] == 0, 5, "the lost gateway's lease is released")


def test_every_child_is_gone_soon_after_the_supervisor_is_killed_and_a_new_one_starts(small: Server) -> None:
    small.chat("tiny", "hello", max_tokens=2)
    children = small.family()[1:]
    assert len(children) >= 4
    small.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    small.start()
    assert small.chat("tiny", "hello", max_tokens=2).status == 200


def test_a_second_instance_exits_at_once_and_names_the_first(small: Server) -> None:
    begun = time.monotonic()
    second = subprocess.run([*OMLXCTL, "serve"], env=small.env(), capture_output=True, text=True, timeout=20)
    assert second.returncode != 0
    assert f"pid {small.process.pid}" in second.stderr
    assert time.monotonic() - begun < 5
    assert small.get("/health").status == 200


def test_a_taken_port_is_refused_by_name_and_nothing_is_started(tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, home_with({"tiny": tiny}) as home:
        env = {**Server(home).env(), "OMLX_PORT": str(taken.getsockname()[1])}
        done = subprocess.run([*OMLXCTL, "serve"], env=env, capture_output=True, text=True, timeout=20)
        assert done.returncode != 0
        assert f"in use by process {os.getpid()}" in done.stderr


def test_an_unusable_home_is_named_with_what_to_do(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    env = {**Server(tmp_path).env(), "OMLX_HOME": str(blocked / "home")}
    done = subprocess.run([*OMLXCTL, "serve"], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode != 0
    assert str(blocked / "home") in done.stderr and "OMLX_HOME" in done.stderr


def test_streams_get_an_error_event_when_the_server_is_stopped(small: Server) -> None:
    small.ctl("load", "tiny")
    children = small.family()[1:]
    stream = Stream(small, "tiny", "hello", max_tokens=1500)
    stream.until_content()
    begun = time.monotonic()
    assert small.stop() == 0
    assert time.monotonic() - begun < 25
    rest = stream.rest()
    assert "[DONE]" not in rest
    assert json.loads(rest[-1])["error"]["code"] == "shutting_down"
    assert not any(child.is_running() for child in children)


def test_a_client_that_leaves_frees_its_place(small: Server) -> None:
    stream = Stream(small, "tiny", "hello", max_tokens=1500)
    stream.until_content()
    assert small.model("tiny")["leases"] == 1
    stream.close()
    small.wait_for(lambda: small.model("tiny")["leases"] == 0, 1.0, "the lease of a client that left is released")
    small.wait_for(lambda: (small.model("tiny")["beat"] or {}).get("running") == 0, 5, "the worker runs nothing for nobody")
