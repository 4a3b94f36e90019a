"""Any process may die at any moment: nothing hangs, the others go on, the client hears of it properly."""

import json
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.stands.looking import Looking
from tests.stands.patience import patient_s
from tests.stands.raw_stream import Stream
from tests.stands.server import OMLXCTL, Server, home_with
from tests.stands.storm import Ask, carry_out


def test_a_stream_whose_worker_is_killed_ends_with_an_error_and_the_next_request_restores(small: Server) -> None:
    system = "The quick brown fox jumps over the lazy dog. " * 30
    first = small.chat("tiny", "hello", system=system, max_tokens=4)
    small.wait_for(lambda: list((small.home / "cache").rglob("*.safetensors")), 10, "a block is on disk")
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
    assert time.monotonic() - killed < patient_s(3.0)
    assert small.pid_of("tiny") == worker


def test_through_a_killed_gateway_answers_are_cut_its_leases_end_and_its_work_stops(small: Server) -> None:
    small.ctl("load", "tiny")
    with Looking(small) as look, ThreadPoolExecutor(1) as pool:
        streamed = Stream(small, "tiny", "hello", max_tokens=1500)
        streamed.until_content()
        whole = pool.submit(carry_out, small.port, Ask("chat", "tiny", "Tell me a story.", 1500))
        look.until("tiny", lambda m: m["leases"] == 2)
        worker = look.model("tiny")["pid"]
        os.kill(small.pid_of("gateway"), signal.SIGKILL)
        assert "[DONE]" not in streamed.rest()
        assert whole.result(patient_s(30)).how == "aborted"
        look.until("tiny", lambda m: m["leases"] == 0, 5)
        idle = look.until("tiny", lambda m: m["beat"]["running"] == m["beat"]["waiting"] == 0, 10)
        assert carry_out(small.port, Ask("chat", "tiny", "hello", 2)).how == "whole"
        assert idle["pid"] == look.model("tiny")["pid"] == worker
        look.until_nothing_is_left()


def test_every_child_is_gone_soon_after_the_supervisor_is_killed_and_what_it_left_keeps_no_new_one_from_starting(
    small: Server,
) -> None:
    small.chat("tiny", "hello", max_tokens=2)
    children = small.family()[1:]
    assert len(children) >= 4
    small.wait_for((small.home / "state" / "busy.json").exists, 10, "what it was at is on the disk")
    small.kill()
    _, alive = psutil.wait_procs(children, timeout=patient_s(10))
    assert not alive
    run = small.home / "run"
    assert {path.name for path in run.glob("*.sock")} == {"control.sock", "data.sock"}
    (run / "omlxd.lock").write_text(f"{os.getpid()}\n")  # a pid that lives, but holds no lock
    (run / "children.json").write_text("{")
    small.start()
    assert "did not end in order; it was busy with tiny" in small.said()
    assert small.chat("tiny", "hello", max_tokens=2).status == 200
    assert small.stop() == 0 and not (small.home / "state" / "busy.json").exists()


def test_a_reload_while_busy_never_drops_a_live_worker(small: Server) -> None:
    """A change that needs another worker waits for the answers under way; any other change needs none."""
    small.ctl("load", "tiny")
    with Looking(small) as look:
        first = look.model("tiny")["pid"]
        stream = Stream(small, "tiny", "hello", max_tokens=1500)
        stream.until_content()
        psutil.Process(first).suspend()  # so that the answer is still under way
        try:
            for settings in ({"sampling": {"top_k": 7}}, {"models": {"tiny": {"context": 1600}}}):
                (small.home / "settings.json").write_text(json.dumps(settings))
                small.ctl("reload")
            shown = look.model("tiny")
        finally:
            psutil.Process(first).resume()
        assert (shown["pid"], shown["leases"], shown["state"]) == (first, 1, "draining")
        after = Stream(small, "tiny", "hello", max_tokens=2)
        assert stream.rest()[-1] == "[DONE]"
        assert after.rest()[-1] == "[DONE]"
        renewed = look.model("tiny")
        assert renewed["pid"] != first and renewed["context"] == 1600 and renewed["restarts"] == 0
        look.until_nothing_is_left()


def test_a_second_instance_exits_at_once_and_names_the_first(small: Server) -> None:
    begun = time.monotonic()
    second = subprocess.run([*OMLXCTL, "serve"], env=small.env(), capture_output=True, text=True, timeout=patient_s(20))
    assert second.returncode != 0
    assert f"pid {small.process.pid}" in second.stderr
    assert time.monotonic() - begun < patient_s(5)
    assert small.get("/health").status == 200


def test_a_taken_port_is_refused_by_name_and_nothing_is_started(tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, home_with({"tiny": tiny}) as home:
        env = {**Server(home).env(), "OMLX_PORT": str(taken.getsockname()[1])}
        done = subprocess.run([*OMLXCTL, "serve"], env=env, capture_output=True, text=True, timeout=patient_s(20))
        assert done.returncode != 0
        assert f"in use by process {os.getpid()}" in done.stderr


def test_an_unusable_home_is_named_with_what_to_do(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    env = {**Server(tmp_path).env(), "OMLX_HOME": str(blocked / "home")}
    done = subprocess.run([*OMLXCTL, "serve"], env=env, capture_output=True, text=True, timeout=patient_s(20))
    assert done.returncode != 0
    assert str(blocked / "home") in done.stderr and "OMLX_HOME" in done.stderr


def test_streams_get_an_error_event_when_the_server_is_stopped(small: Server) -> None:
    small.ctl("load", "tiny")
    children = small.family()[1:]
    stream = Stream(small, "tiny", "hello", max_tokens=1500)
    stream.until_content()
    begun = time.monotonic()
    assert small.stop() == 0
    assert time.monotonic() - begun < patient_s(12)
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
