"""The server as launchd runs it, from install to uninstall: real processes under the stand-in's launchd, on the rendered plist.

`omlxctl service` runs in the test's process, for its launchctl to be the stand-in's; the service itself is a process like any.
"""

import json
import os
import plistlib
import resource
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from supervisor import ctl_service
from supervisor.service import Account, ServicePlan, account_of
from supervisor.service_launchd import LABEL, Launchd
from tests.stands.launchd_stand import Job, LaunchdStand
from tests.stands.server import Server, home_with
from tests.supervisor.ctl_stand import Ran, Shell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on macOS it would be launchd itself; reads /proc")

DOMAIN = f"gui/{os.getuid()}"


@dataclass
class Mac:
    """A user's machine: their launchd, their home with omlxd's in it, and omlxctl."""

    launchd: LaunchdStand
    server: Server
    shell: Shell

    def service(self, *words: str) -> Ran:
        ran = self.shell("service", *words)
        if job := self.launchd.jobs.get(f"{DOMAIN}/{LABEL}"):
            status = self.server.ctl("status", "--json", check=False)
            self.server.port = json.loads(status.stdout)["port"] if job.pid and status.returncode == 0 else 0
        return ran

    @property
    def job(self) -> Job:
        return self.launchd.jobs[f"{DOMAIN}/{LABEL}"]

    @property
    def log(self) -> Path:
        return self.server.home / "logs" / "service.out"


@pytest.fixture
def mac(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Mac]:
    launchd = LaunchdStand(DOMAIN)

    def keeper_of(account: Account, system: bool) -> Launchd:
        assert not system
        return Launchd(replace(account, home=tmp_path / "user"), system=False, run=launchd.launchctl)

    with home_with({"tiny": tiny}) as home:
        server = Server(home, {"server": {"port": 0}})
        server.output.touch()
        monkeypatch.setattr(ctl_service, "keeper_of", keeper_of)
        monkeypatch.setenv("OMLX_HOME", str(home))
        monkeypatch.setenv("ONLY_IN_THIS_SHELL", "1")
        try:
            yield Mac(launchd, server, Shell(home, monkeypatch, capsys))
        finally:
            launchd.close()


def test_a_service_serves_comes_back_after_a_crash_and_stays_down_when_asked_to_stop(mac: Mac) -> None:
    ran = mac.service("install")
    assert (ran.status, f"serves on {mac.server.url}" in ran.out) == (0, True), ran
    assert mac.server.chat("tiny", "hello", max_tokens=4).status == 200
    first = mac.job.pid
    assert first is not None and first == mac.server.status()["pid"]
    mac.server.ctl("restart")
    assert (mac.job.pid, mac.job.exits) == (first, []), "launchd sees nothing of a restart in place"
    assert mac.server.chat("tiny", "hello", max_tokens=4).status == 200

    os.kill(first, signal.SIGKILL)
    mac.server.wait_for(lambda: mac.job.exits, 5, "launchd sees its end")
    mac.server.wait_for(lambda: mac.service("status").status == 0 and mac.server.port, 30, "it runs again")
    assert mac.job.starts[1] - mac.job.starts[0] >= 10
    assert mac.job.pid not in (None, first)
    assert mac.server.chat("tiny", "hello", max_tokens=4).status == 200

    mac.server.ctl("stop")
    mac.server.wait_for(lambda: mac.job.state == "idle", 5, "launchd leaves it alone")
    assert mac.job.exits == [-signal.SIGKILL, 0]


def test_the_plists_environment_limits_and_mask_reach_the_worker(mac: Mac) -> None:
    assert mac.service("install").status == 0
    mac.server.ctl("load", "tiny")
    worker = Path(f"/proc/{mac.server.pid_of('tiny')}")
    limit = next(line for line in (worker / "limits").read_text().splitlines() if line.startswith("Max open files"))
    own_soft, own_hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # mlx_lm lowers both in this process when it makes tiny
    assert int(limit.split()[3]) == min(10240, own_hard) != own_soft
    assert "Umask:\t0077" in (worker / "status").read_text()
    assert (worker / "cwd").resolve() == mac.server.home.resolve()
    environment = dict(item.split("=", 1) for item in (worker / "environ").read_text().split("\0") if item)
    assert environment["OMLX_HOME"] == str(mac.server.home)
    assert environment["PATH"].startswith(f"{Path(sys.executable).parent}:") and environment["PATH"].endswith("/usr/sbin:/sbin")
    assert environment["HOME"] and "ONLY_IN_THIS_SHELL" not in environment
    assert mac.log.stat().st_mode & 0o077 == 0


def test_a_taken_port_ends_the_service_for_good_and_names_who_holds_it(mac: Mac) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        port = held.getsockname()[1]
        (mac.server.home / "settings.json").write_text(json.dumps({"server": {"port": port}}))
        ran = mac.service("install")
        assert ran.status == 1
        assert f"127.0.0.1:{port} is already in use by process {os.getpid()}" in ran.err
        assert f"in use by process {os.getpid()}" in mac.log.read_text()
        mac.server.wait_for(lambda: mac.job.state == "idle", 5, "launchd does not try again")
        assert (mac.job.exits, len(mac.job.starts)) == ([0], 1)
        shown = mac.service("status")
        assert (shown.status, "last exit: 0" in shown.out, "is already in use" in shown.out) == (3, True, True)
    assert mac.service("start").status == 0
    assert mac.server.port == port


def test_a_server_in_a_terminal_keeps_its_home_and_the_service_ends_naming_it(mac: Mac) -> None:
    mac.server.start()
    ran = mac.service("install")
    assert ran.status == 1
    assert f"already running (pid {mac.server.process.pid})" in ran.err
    mac.server.wait_for(lambda: mac.job.state == "idle", 5, "launchd does not try again")
    assert mac.job.exits == [0]
    assert mac.server.status()["pid"] == mac.server.process.pid
    assert mac.server.stop() == 0
    assert mac.service("start").status == 0


def test_wrong_settings_end_the_service_with_every_key_path_in_its_log(mac: Mac) -> None:
    assert mac.service("install").status == 0
    assert mac.service("stop").status == 0
    (mac.server.home / "settings.json").write_text('{"server": {"port": "x"}, "smapling": {}}')
    ran = mac.service("start")
    mac.server.wait_for(lambda: mac.job.state == "idle", 5, "launchd leaves it alone")
    assert (ran.status, mac.job.exits) == (1, [0])
    assert "server.port" in ran.err and "smapling: unknown section" in ran.err


def test_a_name_that_means_two_models_ends_the_service_for_good(mac: Mac) -> None:
    (mac.server.home / "models" / "twin").symlink_to(mac.server.home / "models" / "tiny")
    (mac.server.home / "settings.json").write_text('{"server": {"port": 0}, "models": {"tiny": {"aliases": ["twin"]}}}')
    ran = mac.service("install")
    mac.server.wait_for(lambda: mac.job.state == "idle", 5, "launchd leaves it alone")
    assert (ran.status, mac.job.exits) == (1, [0])
    assert "twin would name both tiny and twin" in ran.err and "Traceback" not in ran.err


def test_a_stop_ends_a_running_stream_with_an_error_well_before_it_would_be_killed(mac: Mac) -> None:
    assert mac.service("install").status == 0
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 1900,
        "temperature": 0,
    }
    request = urllib.request.Request(f"{mac.server.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as stream:
        while b'"content":"' not in (line := stream.readline()):
            assert line, "it ended before any content"
        begun = time.monotonic()
        assert mac.service("stop").status == 0
        assert time.monotonic() - begun < 25
        rest = [line for line in stream if line.startswith(b"data: ")]
    assert b"error" in rest[-1] and b"[DONE]" not in rest[-1]
    assert mac.job.exits == [0]
    assert mac.service("status").status == 3


def test_a_stop_waits_for_a_job_that_ignores_it_until_launchd_kills_it(tmp_path: Path) -> None:
    launchd = LaunchdStand(DOMAIN)
    keeper = Launchd(replace(account_of(), home=tmp_path), system=False, run=launchd.launchctl)
    ready = tmp_path / "ready"
    plan = ServicePlan(
        ("/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"),
        *(tmp_path, tmp_path / "out", "/bin"),
        account_of(),
    )
    keeper.definition.parent.mkdir(parents=True)
    keeper.definition.write_bytes(plistlib.dumps(plistlib.loads(keeper.render(plan)) | {"ExitTimeOut": 1}))
    keeper.start()
    while not ready.exists():
        time.sleep(0.02)
    job = launchd.jobs[f"{DOMAIN}/{LABEL}"]
    begun = time.monotonic()
    keeper.stop()
    assert time.monotonic() - begun >= 1
    assert (job.exits, job.gone.is_set()) == ([-signal.SIGKILL], True)


def test_installing_again_restarts_only_what_has_changed(mac: Mac) -> None:
    mac.service("install")
    first = mac.job.pid
    again = mac.service("install")
    assert (again.status, "installed already" in again.out, mac.job.pid) == (0, True, first)
    (mac.server.home / "settings.json").write_text(
        json.dumps({"server": {"port": 0}, "logging": {"log_dir": str(mac.server.home / "elsewhere")}})
    )
    changed = mac.service("install")
    assert (changed.status, "installed anew" in changed.out) == (0, True), changed
    assert mac.job.pid not in (None, first)
    assert (mac.server.home / "elsewhere" / "service.out").exists()


def test_uninstalling_leaves_models_cache_and_settings_and_says_where_they_are(mac: Mac) -> None:
    mac.service("install")
    mac.server.chat("tiny", "hello " * 200, max_tokens=4)
    plist = Path(json.loads(mac.service("status", "--json").out)["definition"])
    pid = mac.job.pid
    ran = mac.service("uninstall")
    assert ran.status == 0
    assert str(mac.server.home) in ran.out and str(mac.server.home / "cache") in ran.out
    assert not plist.exists() and not Path(f"/proc/{pid}").exists()
    assert (mac.server.home / "models" / "tiny" / "config.json").exists()
    assert list((mac.server.home / "cache").rglob("*.safetensors"))
    assert (mac.server.home / "settings.json").exists()
    assert mac.service("uninstall").out == "the service was not installed\n"
    assert account_of().home not in plist.parents  # nothing of this test was ever near the real one's home


def test_the_machines_service_is_a_daemon_of_its_user_and_lives_the_same_life(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launchd = LaunchdStand("system")

    def keeper_of(account: Account, system: bool) -> Launchd:
        assert system
        return Launchd(account, system=True, run=launchd.launchctl, root=tmp_path)

    with home_with({"tiny": tiny}) as home:
        server = Server(home, {"server": {"port": 0}})
        server.output.touch()
        monkeypatch.setattr(ctl_service, "keeper_of", keeper_of)
        monkeypatch.setattr(ctl_service, "_require_root", lambda system: None)
        monkeypatch.setenv("OMLX_HOME", str(home))
        shell = Shell(home, monkeypatch, capsys)
        try:
            me = account_of()
            ran = shell("service", "install", "--system", "--user", me.name, "--json")
            assert ran.status == 0, ran
            said, job = json.loads(ran.out), launchd.jobs[f"system/{LABEL}"]
            assert (said["outcome"], said["pid"]) == ("installed", job.pid)
            definition = tmp_path / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
            assert said["definition"] == str(definition)
            assert plistlib.loads(definition.read_bytes())["UserName"] == me.name
            assert server.status()["pid"] == job.pid
            again = json.loads(shell("service", "install", "--system", "--user", me.name, "--json").out)
            assert (again["outcome"], again["pid"]) == ("unchanged", said["pid"])
            assert shell("service", "stop", "--system").status == 0
            assert shell("service", "status", "--system").status == 3
            assert json.loads(shell("service", "start", "--system", "--json").out)["pid"] not in (None, said["pid"])
            removed = json.loads(shell("service", "uninstall", "--system", "--json").out)
            assert removed == {"removed": str(definition)} and not definition.exists()
            assert (home / "models").exists() and shell("status").status == 3
        finally:
            launchd.close()
