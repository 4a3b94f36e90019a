"""The server's own process is held up, as by a sleep of the machine: what lived before must live afterwards."""

import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.stands.clients import Streamed, stream
from tests.stands.patience import patient_s
from tests.stands.server import Server, home_with, running

BEAT_LOST_S = 4.0


def test_a_supervisor_that_was_stopped_for_longer_than_heartbeats_may_be_missing_kills_nobody(tiny: Path) -> None:
    with (
        running({"tiny": tiny, "other": tiny}, {"timers": {"beat_lost_s": BEAT_LOST_S}}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.ctl("load", "tiny")
        server.ctl("load", "other")
        assert server.process is not None
        before = {name: server.pid_of(name) for name in ("tiny", "other", "gateway", "text")}
        streamed = Streamed()
        ended = pool.submit(stream, server, "tiny", 200, streamed)
        server.wait_for(lambda: streamed.tokens, 20, "the stream has begun")
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(BEAT_LOST_S + 1)
        os.kill(server.process.pid, signal.SIGCONT)
        assert ended.result(60).done and streamed.error is None
        time.sleep(BEAT_LOST_S)
        assert {name: server.pid_of(name) for name in before} == before
        assert "nothing could be heeded" in server.ctl("logs", "omlxd").stdout


WALL = """
import os, pathlib, time
_wall, _slept = time.time, pathlib.Path(os.environ["SLEPT"])
time.time = lambda: _wall() + float(_slept.read_text())
"""
"""After a sleep the wall clock has gone on and the monotonic one has not, which no test can do to a machine."""


def test_what_happened_before_a_sleep_keeps_its_date_in_the_status(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WALL)
    slept = tmp_path / "slept"
    slept.write_text("0")
    with home_with({"tiny": tiny, "other": tiny}) as home:
        server = Server(home)
        server.variables["SLEPT"] = str(slept)
        server.variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        server.start()
        try:
            server.ctl("load", "tiny")
            before = server.model("tiny")["since"]
            assert abs(before - time.time()) < 60
            (tmp_path / "next").write_text("7200")
            (tmp_path / "next").replace(slept)
            server.ctl("load", "other")
            assert server.model("tiny")["since"] == pytest.approx(before, abs=5)
            assert server.model("other")["since"] == pytest.approx(time.time() + 7200, abs=60)
        finally:
            server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS it is caffeinate itself: docs/mac-checklist.md")
def test_the_machine_may_not_fall_asleep_while_a_request_runs(tiny: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    stand_in = tmp_path / "systemd-inhibit"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {told}\nwhile [ "${{1#--}}" != "$1" ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    with home_with({"tiny": tiny}) as home:
        server = Server(home)
        server.variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        server.start()
        try:
            server.ctl("load", "tiny")
            assert not told.exists(), "a loaded model alone keeps nobody awake"
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
                link.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{")
                server.wait_for(told.exists, 20, "the system is told, although no model has it yet")
            assert server.chat("tiny", "hello", max_tokens=2).status == 200
            assert "--what=idle --who=omlxd" in told.read_text()
            holder = next(p for p in server.family() if p.name() == "tail")
            server.kill()
            psutil.wait_procs([holder], timeout=patient_s(10))
            assert not holder.is_running(), "it ends with the server, however that ends"
        finally:
            server.stop()
