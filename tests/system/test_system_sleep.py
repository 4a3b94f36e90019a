"""The server's own process is held up, as by a sleep of the machine: what lived before must live afterwards."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.stands.clients import Streamed, stream
from tests.stands.server import running

BEAT_LOST_S = 2.0


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
        time.sleep(2 * BEAT_LOST_S)
        os.kill(server.process.pid, signal.SIGCONT)
        assert ended.result(60).done and streamed.error is None
        time.sleep(BEAT_LOST_S)
        assert {name: server.pid_of(name) for name in before} == before
        assert "nothing could be heeded" in server.ctl("logs", "omlxd").stdout
