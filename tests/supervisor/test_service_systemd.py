"""systemd as the keeper: a unit that systemd itself finds right, and the order in which systemctl is asked."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from supervisor import service
from supervisor.service import Account, Job, KeeperFailed, KeeperMissing, Ran, ServicePlan
from supervisor.service_systemd import Systemd

LOADED = "LoadState=loaded\nActiveState=active\nMainPID=0\nExecMainStatus=0\nExecMainExitTimestamp="
RUNNING = LOADED.replace("MainPID=0", "MainPID=77")
ENDED = LOADED.replace("ExecMainStatus=0", "ExecMainStatus=3") + "Mon 2025-01-06 10:00:00 UTC"
UNKNOWN = "LoadState=not-found\nActiveState=inactive\nMainPID=0\nExecMainStatus=0\nExecMainExitTimestamp="


@dataclass
class Systemctl:
    """Answers `show` with one text; `fails` are the verbs it refuses."""

    shown: str = UNKNOWN
    fails: tuple[str, ...] = ()
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> Ran:
        assert command[0] == "systemctl"
        words = list(command[1:])
        self.calls.append(words)
        verb = next(word for word in words if not word.startswith("-"))
        return Ran(1, err=f"{verb} is refused") if verb in self.fails else Ran(0, self.shown)

    def did(self) -> list[str]:
        verbs = [next(word for word in words if not word.startswith("-")) for words in self.calls]
        return [verb for verb in verbs if verb != "show"]


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account("daemon", os.getuid(), os.getgid(), tmp_path / "user")


def plan_of(account: Account, home: Path) -> ServicePlan:
    return ServicePlan(
        ("/bin/true", "-P", "-m", "supervisor.service_main"), home, home / "service.out", "/venv/bin:/bin", account
    )


def keeper(account: Account, systemctl: Systemctl, tmp_path: Path, *, system: bool = False) -> Systemd:
    return Systemd(account, system=system, run=systemctl, root=tmp_path, booted=tmp_path)


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", ["home", 'odd "name" 100%h $HOME \\x'])
def test_systemd_finds_nothing_wrong_with_the_unit(account: Account, tmp_path: Path, system: bool, name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    job = keeper(account, Systemctl(), tmp_path, system=system)
    unit = tmp_path / "omlxd.service"
    unit.write_bytes(job.render(plan_of(account, tmp_path / name)))
    command = ["systemd-analyze", *(() if system else ("--user",)), "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 0
    assert [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line] == []


def test_a_unit_restarts_after_failures_only_and_keeps_its_workers_from_signals_and_its_files_private(
    account: Account, tmp_path: Path
) -> None:
    lines = keeper(account, Systemctl(), tmp_path).render(plan_of(account, tmp_path / "a %h")).decode().splitlines()
    for line in (
        *("Type=exec", "Restart=on-failure", "RestartSec=10", "TimeoutStopSec=30", "LimitNOFILE=10240:20480", "UMask=0077"),
        *("KillMode=mixed", "OOMPolicy=continue", "WantedBy=default.target"),
        f"WorkingDirectory={tmp_path}/a %%h",
        f"StandardError=append:{tmp_path}/a %%h/service.out",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("User=")]


def test_a_machines_unit_names_its_user_and_needs_no_login(account: Account, tmp_path: Path) -> None:
    systemctl = Systemctl()
    job = keeper(account, systemctl, tmp_path, system=True)
    lines = job.render(plan_of(account, tmp_path)).decode().splitlines()
    assert "User=daemon" in lines and "WantedBy=multi-user.target" in lines
    assert job.definition == tmp_path / "etc/systemd/system/omlxd.service"
    job.start()
    assert systemctl.calls == [["start", "omlxd.service"]]


@pytest.mark.parametrize("name", ["home", 'odd "name" 100%h $HOME \\x', "\\\\%%"])
def test_the_home_is_read_back_from_the_unit_as_it_was(account: Account, tmp_path: Path, name: str) -> None:
    job = keeper(account, Systemctl(), tmp_path)
    assert job.home_in(job.render(plan_of(account, tmp_path / name))) == tmp_path / name
    assert job.home_in(b"[Service]\n") is None


def test_a_dollar_in_a_command_stays_one(account: Account, tmp_path: Path) -> None:
    plan = ServicePlan(("/a $b/c%d",), tmp_path, tmp_path / "o", "/bin", account)
    assert 'ExecStart="/a $$b/c%%d"' in keeper(account, Systemctl(), tmp_path).render(plan).decode()


def test_where_systemd_does_not_run_the_error_says_what_to_do_instead_and_nothing_is_written(
    account: Account, tmp_path: Path
) -> None:
    systemctl = Systemctl()
    job = Systemd(account, system=False, run=systemctl, booted=tmp_path / "not-there")
    with pytest.raises(KeeperMissing, match="omlxctl serve"):
        service.install(job, plan_of(account, tmp_path / "home"))
    assert not job.definition.exists() and not (tmp_path / "home").exists()
    assert systemctl.calls == []


def test_a_session_without_the_users_systemd_is_told_so(account: Account, tmp_path: Path) -> None:
    with pytest.raises(KeeperMissing, match="log in as that user"):
        keeper(account, Systemctl(fails=("show",)), tmp_path).require()


def test_an_install_is_known_enabled_and_started_in_this_order(account: Account, tmp_path: Path) -> None:
    systemctl = Systemctl()
    job = keeper(account, systemctl, tmp_path)
    assert service.install(job, plan_of(account, tmp_path / "home")) == "installed"
    assert systemctl.did() == ["daemon-reload", "enable", "start"]
    assert all(call[0] == "--user" for call in systemctl.calls)
    systemctl.calls.clear()
    systemctl.shown = RUNNING
    assert service.install(job, plan_of(account, tmp_path / "other")) == "changed"
    assert systemctl.did() == ["stop", "daemon-reload", "enable", "start"]


def test_an_uninstall_stops_disables_and_forgets(account: Account, tmp_path: Path) -> None:
    systemctl = Systemctl()
    job = keeper(account, systemctl, tmp_path)
    service.install(job, plan_of(account, tmp_path / "home"))
    systemctl.calls.clear()
    systemctl.shown = RUNNING
    assert service.uninstall(job)
    assert systemctl.did() == ["stop", "disable", "daemon-reload"]
    assert not job.definition.exists()


def test_what_systemctl_refuses_is_told_with_its_words(account: Account, tmp_path: Path) -> None:
    job = keeper(account, Systemctl(fails=("enable",)), tmp_path)
    with pytest.raises(KeeperFailed, match=r"systemctl --user enable omlxd\.service: enable is refused"):
        service.install(job, plan_of(account, tmp_path / "home"))


def test_a_unit_that_runs_ended_or_is_unknown_is_told_apart(account: Account, tmp_path: Path) -> None:
    def job(shown: str) -> Job:
        return keeper(account, Systemctl(shown), tmp_path).job()

    assert job(RUNNING) == Job(known=True, pid=77)
    assert job(ENDED) == Job(known=True, last_exit="3")
    assert job(LOADED) == Job(known=True)
    assert job(UNKNOWN) == Job(known=False)
