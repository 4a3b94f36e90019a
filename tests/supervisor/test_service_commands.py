"""omlxctl service before anything is started: whose service it is, what is refused, what is said. A keeper that only notes."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from supervisor import ctl_service
from supervisor.paths import paths_of
from supervisor.service import Account, Job, KeeperFailed, Ran, ServicePlan
from supervisor.service_launchd import Launchd
from supervisor.service_systemd import Systemd
from supervisor.settings import Settings
from tests.supervisor.ctl_stand import ScriptedSupervisor, Shell


@dataclass
class NotingKeeper:
    """A keeper whose definition is the home. Its job is what the test says."""

    definition: Path
    lasting: str = "as long as the test"
    state: Job = field(default_factory=lambda: Job(known=False))
    plan: ServicePlan | None = None
    account: Account | None = None
    refusal: str | None = None

    def require(self) -> None:
        if self.refusal:
            raise KeeperFailed(("keeper", "do"), Ran(1, err=self.refusal))

    def render(self, plan: ServicePlan) -> bytes:
        self.plan = plan
        return str(plan.home).encode()

    def home_in(self, definition: bytes) -> Path | None:
        return Path(definition.decode()) if definition else None

    def job(self) -> Job:
        return self.state

    def enroll(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def withdraw(self) -> None: ...
    def forget(self) -> None: ...


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NotingKeeper:
    it = NotingKeeper(tmp_path / "definition")

    def keeper_of(account: Account, system: bool) -> NotingKeeper:
        it.account = account
        return it

    monkeypatch.setattr(ctl_service, "keeper_of", keeper_of)
    return it


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def runs(keeper: NotingKeeper) -> None:
    """The scripted supervisor is this process."""
    keeper.state = Job(known=True, pid=os.getpid())


def test_install_says_where_it_serves_and_how_long_it_lasts(
    shell: Shell, keeper: NotingKeeper, server: ScriptedSupervisor, home: Path
) -> None:
    runs(keeper)
    ran = shell("service", "install")
    assert ran.status == 0, ran
    assert "serves on http://127.0.0.1:8123" in ran.out and "as long as the test" in ran.out
    assert keeper.plan is not None and keeper.plan.home == home and keeper.plan.log == home / "logs" / "service.out"


def test_variables_of_the_shell_do_not_change_the_service_and_install_says_so(
    shell: Shell, keeper: NotingKeeper, server: ScriptedSupervisor, home: Path
) -> None:
    runs(keeper)
    shell.patch.setenv("OMLX_LOG_DIR", "/elsewhere")
    ran = shell("service", "install")
    assert "OMLX_LOG_DIR" in ran.err and "settings.json" in ran.err
    assert keeper.plan is not None and keeper.plan.log == home / "logs" / "service.out"


def test_wrong_settings_are_refused_before_anything_is_installed(shell: Shell, keeper: NotingKeeper, home: Path) -> None:
    (home / "settings.json").write_text('{"server": {"port": "x"}}')
    ran = shell("service", "install")
    assert (ran.status, "server.port" in ran.err) == (2, True)
    assert not keeper.definition.exists()


def test_a_machines_service_is_roots_to_change(shell: Shell, keeper: NotingKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    for words in (("install",), ("start",), ("stop",), ("uninstall",)):
        ran = shell("service", *words, "--system")
        assert (ran.status, "sudo " in ran.err) == (1, True), words
    assert shell("service", "status", "--system").status == 3


def test_a_machines_service_runs_as_who_called_sudo_never_silently_as_root(
    shell: Shell, keeper: NotingKeeper, as_root: None, home: Path, server: ScriptedSupervisor
) -> None:
    shell.patch.delenv("SUDO_USER", raising=False)
    refused = shell("service", "install", "--system")
    assert (refused.status, "--user NAME" in refused.err) == (2, True)
    runs(keeper)
    name = ctl_service.services.account_of().name
    shell.patch.setenv("SUDO_USER", name)
    assert shell("service", "install", "--system").status == 0
    assert keeper.account is not None and keeper.account.name == name
    assert shell("service", "install", "--system", "--user", "no-such-user").status == 4
    assert shell("service", "install", "--user", name).status == 2


def test_a_start_that_ends_at_once_shows_what_it_printed_this_time(shell: Shell, keeper: NotingKeeper, home: Path) -> None:
    keeper.definition.write_text(str(home))
    keeper.state = Job(known=True, last_exit="0")
    log = home / "logs" / "service.out"
    log.parent.mkdir()
    log.write_text("words of the time before\n")

    def start() -> None:
        with log.open("a") as out:
            out.write("the port is taken\n")

    keeper.start = start
    ran = shell("service", "start")
    assert ran.status == 1
    assert "the port is taken" in ran.err and "time before" not in ran.err


def test_another_server_in_its_place_is_not_taken_for_the_service(
    shell: Shell, keeper: NotingKeeper, server: ScriptedSupervisor, home: Path
) -> None:
    keeper.definition.write_text(str(home))
    keeper.state = Job(known=True, pid=1)
    shown = json.loads(shell("service", "status", "--json").out)
    assert (shown["pid"], shown["address"]) == (1, None)
    runs(keeper)
    assert json.loads(shell("service", "status", "--json").out)["address"] == "http://127.0.0.1:8123"


def test_status_follows_the_installed_home_whatever_this_shells_home_is(
    shell: Shell, keeper: NotingKeeper, server: ScriptedSupervisor, home: Path, tmp_path: Path
) -> None:
    keeper.definition.write_text(str(home))
    runs(keeper)
    shell.patch.setenv("OMLX_HOME", str(tmp_path / "another"))
    ran = shell("service", "status")
    assert (ran.status, "http://127.0.0.1:8123" in ran.out, str(home) in ran.out) == (0, True, True)


def test_without_a_service_status_and_start_say_how_to_get_one(shell: Shell, keeper: NotingKeeper) -> None:
    status, start = shell("service", "status"), shell("service", "start")
    assert (status.status, "omlxctl service install" in status.out) == (3, True)
    assert (start.status, "not installed" in start.err) == (4, True)


def test_what_the_keeper_refuses_ends_the_command_with_its_words(shell: Shell, keeper: NotingKeeper, home: Path) -> None:
    keeper.definition.write_text(str(home))
    keeper.refusal = "computer says no"
    for words in (("install",), ("start",), ("stop",), ("status",), ("uninstall",)):
        ran = shell("service", *words)
        assert (ran.status, "computer says no" in ran.err) == (1, True), words


def test_each_system_has_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    account = ctl_service.services.account_of()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(ctl_service.keeper_of(account, system=True), Launchd)
    monkeypatch.setattr(sys, "platform", "linux")
    assert isinstance(ctl_service.keeper_of(account, system=False), Systemd)


def test_the_services_log_is_not_among_those_that_are_deleted_when_silent(tmp_path: Path) -> None:
    from supervisor.logs import remove_old_files
    from supervisor.service import log_of

    log = log_of(paths_of(tmp_path, Settings()))
    log.parent.mkdir()
    log.write_text("")
    os.utime(log, (0, 0))
    remove_old_files(log.parent, retention_days=1)
    assert log.exists()
