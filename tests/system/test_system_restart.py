"""The whole server started again in place: by hand, and by itself after an upgrade under it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stands.clients import Streamed, stream
from tests.stands.patience import patient_s
from tests.stands.server import OMLXCTL, Server, home_with, running

UPGRADED = "9.9.9"


class Knocking:
    """Opens one connection after the other, each with a request, and counts those that found nobody."""

    def __init__(self, port: int) -> None:
        self.refused: list[OSError] = []
        self.answered = 0
        self._port = port
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._knock, daemon=True)

    def __enter__(self) -> "Knocking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(30)

    def _knock(self) -> None:
        while not self._leave.wait(0.02):
            try:
                link = socket.create_connection(("127.0.0.1", self._port), timeout=20)
            except OSError as e:
                self.refused.append(e)
                continue
            try:
                link.sendall(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                self.answered += b" 200 " in link.recv(64)
            except OSError:
                pass  # it was on the old gateway's hands
            finally:
                link.close()


def test_the_server_starts_again_in_place_with_its_flags_and_no_connection_finds_the_port_closed(tiny: Path) -> None:
    with running({"tiny": tiny}, args=("--ttl", "1234", "tiny")) as server:
        before, port, worker = server.status(), server.port, server.pid_of("tiny")
        (server.home / "settings.json").write_text(json.dumps({"timers": {"stop_s": 7}}))
        following = [*OMLXCTL, "logs", "-f", "omlxd"], [*OMLXCTL, "events", "-f"]
        followers = [subprocess.Popen(c, env=server.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for c in following]
        for follower in followers:
            assert follower.stdout is not None and follower.stdout.readline(), "it has begun"
        with Knocking(port) as knocking:
            done = server.ctl("restart")
            assert done.stdout == f"omlxd is started again (pid {before['pid']})\n"
            server.wait_for(lambda: server.get("/health").status == 200, 10, "it serves")
        assert not knocking.refused and knocking.answered > 0
        for follower in followers:
            said, _ = follower.communicate(timeout=patient_s(60))
            assert follower.returncode == 1 and b"started again" in said, "it does not wait for ever"
        after = server.status()
        assert (after["pid"], after["port"]) == (before["pid"], port) and after["started"] > before["started"]
        server.wait_for(lambda: server.model("tiny")["state"] == "ready", 20, "what the command line preloads is loaded")
        assert server.pid_of("tiny") != worker
        assert server.chat("tiny", "hello", max_tokens=2).status == 200
        shown = json.loads(server.ctl("config", "show", "--json").stdout)
        assert (shown["values"]["model.ttl_s"], shown["values"]["timers.stop_s"]) == (1234, 7)
        assert server.ctl("serve", check=False).returncode == 1, "the lock is held all the time"
        assert server.stop() == 0


def test_a_restart_into_wrong_settings_is_refused_and_the_server_goes_on(small: Server) -> None:
    (small.home / "settings.json").write_text('{"server": {"prot": 1}}')
    done = small.ctl("restart", check=False)
    assert done.returncode == 2 and "server.prot" in done.stderr
    (small.home / "settings.json").write_text('{"models": {"tiny": {"aliases": ["other"]}}}')
    assert small.ctl("reload").returncode == 0
    (small.home / "models" / "other").symlink_to(small.home / "models" / "tiny")  # from now on a name means two models
    done = small.ctl("restart", check=False)
    assert done.returncode == 2 and "other would name both" in done.stderr
    assert small.get("/health").status == 200


def test_a_stop_in_the_middle_of_a_restart_is_a_stop(tiny: Path) -> None:
    with running({"tiny": tiny}, {"timers": {"stop_s": 1, "term_s": 0.5}}) as server, ThreadPoolExecutor(1) as pool:
        server.ctl("load", "tiny")
        os.kill(server.pid_of("tiny"), signal.SIGSTOP)  # so that the end takes its time
        restart = pool.submit(server.ctl, "restart", check=False)
        server.wait_for(lambda: "starting again in place" in server.said(), 10, "it has begun")
        assert server.stop() == 0
        assert restart.result(patient_s(60)).returncode == 1, "whoever asked for the restart is told"


def test_after_an_upgrade_nothing_is_loaded_and_with_the_last_answer_the_new_server_takes_over(
    tiny: Path, slow: Path, tmp_path: Path
) -> None:
    with _upgradable({"slow": slow, "other": tiny}, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.ctl("load", "slow")
        before = server.status()
        _install(tmp_path / "site")
        streamed = Streamed()
        ended = pool.submit(stream, server, "slow", 300, streamed)
        server.wait_for(lambda: streamed.tokens, 20, "the stream has begun")
        refused = server.chat("other", "hello", max_tokens=2)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down"), refused
        assert refused.headers["Retry-After"] == "2" and UPGRADED in refused.error["message"]
        assert any("restart needed" in warning for warning in server.get("/api/status").json()["warnings"])
        assert UPGRADED in server.ctl("status").stdout.split("restart needed: ")[1]
        assert not ended.done()
        assert ended.result(patient_s(60)).done and streamed.error is None
        server.wait_for(lambda: _version(server) == UPGRADED, 30, "the new one has taken over")
        after = server.status()
        assert (after["pid"], after["port"], after["restart_needed"]) == (before["pid"], before["port"], "")
        server.wait_for(lambda: server.get("/health").json()["version"] == UPGRADED, 20, "its gateway serves")
        assert server.chat("other", "hello", max_tokens=2).status == 200


def test_a_request_that_has_no_lease_yet_holds_the_restart_back(tiny: Path, tmp_path: Path) -> None:
    with _upgradable({"tiny": tiny, "other": tiny}, tmp_path) as server:
        server.ctl("load", "tiny")
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
            head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            link.sendall(head.encode() + body[:5])
            server.wait_for(lambda: server.get("/api/status").json()["gateway"]["requests"] == 1, 20, "the gateway has it")
            _install(tmp_path / "site")
            assert server.chat("other", "hello", max_tokens=2).status == 503
            assert server.status()["restart_needed"]
            link.sendall(body[5:])
            answer = link.makefile("rb").read()
        assert b" 200 OK" in answer.splitlines()[0] and b"choices" in answer
        server.wait_for(lambda: _version(server) == UPGRADED, 30, "the new one has taken over")


def test_a_stop_while_a_restart_is_needed_is_a_stop(slow: Path, tiny: Path, tmp_path: Path) -> None:
    with _upgradable({"slow": slow, "other": tiny}, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.ctl("load", "slow")
        streamed = Streamed()
        ended = pool.submit(stream, server, "slow", 400, streamed)
        server.wait_for(lambda: streamed.tokens, 20, "the stream has begun")
        _install(tmp_path / "site")
        assert server.chat("other", "hello", max_tokens=2).status == 503
        assert server.status()["restart_needed"] and not ended.done()
        assert server.stop() == 0
        assert not ended.result(patient_s(60)).done and streamed.error
        assert "in place" not in server.said().split("stopping")[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_between_two_lives_of_the_process_is_for_the_second(tiny: Path) -> None:
    with running({"tiny": tiny}) as server, ThreadPoolExecutor(1) as pool:
        assert server.process is not None
        restart = _between_lives(server, pool, signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)
        assert restart.result(patient_s(60)).returncode == 0
        server.wait_for(lambda: "settings reloaded" in server.ctl("logs", "omlxd").stdout, 10, "the second life has served it")
        restart = _between_lives(server, pool, signal.SIGTERM)
        assert server.stop() == 0, "which is how a service manager knows that it meant to go"
        restart.result(patient_s(60))


def _between_lives(
    server: Server, pool: ThreadPoolExecutor, number: signal.Signals
) -> "Future[subprocess.CompletedProcess[str]]":
    """A restart whose first life is over. Whoever looks from outside can miss that: then it is done again."""
    for _ in range(5):
        restart = pool.submit(server.ctl, "restart", check=False)
        while not restart.done():
            if _blocks(server, number):
                return restart
            time.sleep(0.005)
        assert restart.result().returncode == 0, restart.result().stderr
    raise AssertionError("nobody blocks that signal between two lives")


def _blocks(server: Server, number: signal.Signals) -> bool:
    assert server.process is not None
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    blocked = next(line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(blocked, 16) >> (number - 1) & 1)


@contextmanager
def _upgradable(models: dict[str, Path], place: Path) -> Iterator[Server]:
    """A server under which `_install` can put another version."""
    (place / "site").mkdir()
    with home_with(models) as home:
        server = Server(home)
        server.variables["PYTHONPATH"] = os.pathsep.join([str(place / "site"), os.environ.get("PYTHONPATH", "")])
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _install(site: Path) -> None:
    """What an upgrade leaves of it that a process can see: the metadata of another version, found first."""
    info = site / f"omlxd-{UPGRADED}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: omlxd\nVersion: {UPGRADED}\n")
    time.sleep(0.01)


def _version(server: Server) -> object:
    done = server.ctl("status", "--json", check=False)
    return json.loads(done.stdout)["version"] if done.returncode == 0 else None
