"""launchd as the keeper: what the property lists say, and how launchctl's races and refusals are met. No process is started."""

import os
import plistlib
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from supervisor import service
from supervisor.service import Account, Job, KeeperFailed, Ran, ServicePlan
from supervisor.service_launchd import LABEL, Launchd, job_in

RUNNING = "gui/501/x = {\n\tstate = running\n\n\tpid = 44\n\tlast exit code = 1\n\tendpoints = {\n\t\tpid = 1\n\t}\n}\n"
ENDED = "gui/501/x = {\n\tstate = not running\n\n\tlast exit code = 0\n}\n"
FRESH = "gui/501/x = {\n\tstate = spawn scheduled\n\n\tlast exit code = (never exited)\n}\n"
KILLED = "gui/501/x = {\n\tstate = not running\n\n\tlast terminating signal = Killed: 9\n}\n"
EIO = Ran(5, err="Bootstrap failed: 5: Input/output error")
MISSING = Ran(113, err="Could not find service")


@dataclass
class Launchctl:
    """Answers from a script: the answers to each verb in turn, the last of them for ever."""

    answers: dict[str, list[Ran]]
    calls: list[list[str]] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> Ran:
        assert command[0] == "/bin/launchctl"
        self.calls.append(list(command[1:]))
        script = self.answers.get(command[1], [Ran(0)])
        return script.pop(0) if len(script) > 1 else script[0]

    def asked(self, verb: str) -> int:
        return sum(call[0] == verb for call in self.calls)


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account("me", os.getuid(), os.getgid(), tmp_path / "user")


def plan_of(account: Account, home: Path) -> ServicePlan:
    return ServicePlan(
        ("/venv/bin/python", "-P", "-m", "supervisor.service_main"), home, home / "service.out", "/venv/bin:/bin", account
    )


def keeper(account: Account, launchctl: Launchctl, *, system: bool = False, root: Path = Path("/")) -> Launchd:
    return Launchd(account, system=system, run=launchctl, pause=launchctl.paused_s.append, root=root)


def test_an_agent_is_interactive_restarted_only_after_a_crash_and_given_time_files_and_a_private_mask(account: Account) -> None:
    home = account.home / 'odd <&> "name" @PATH@'
    job = keeper(account, Launchctl({}))
    plist = plistlib.loads(job.render(plan_of(account, home)))
    assert plist["ProcessType"] == "Interactive"
    assert plist["RunAtLoad"] is True and plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ThrottleInterval"] == 10 and plist["ExitTimeOut"] == service.EXIT_TIMEOUT_S == 30
    assert plist["SoftResourceLimits"] == {"NumberOfFiles": 10240} and plist["HardResourceLimits"]["NumberOfFiles"] > 10240
    assert plist["Umask"] == 0o077
    assert plist["ProgramArguments"] == ["/venv/bin/python", "-P", "-m", "supervisor.service_main"]
    assert plist["WorkingDirectory"] == str(home)
    assert plist["StandardOutPath"] == plist["StandardErrorPath"] == str(home / "service.out")
    assert plist["EnvironmentVariables"] == {"OMLX_HOME": str(home), "PATH": "/venv/bin:/bin"}
    assert "UserName" not in plist
    assert not [value for value in str(plist).replace(str(home), "").split() if "@" in value]
    assert job.home_in(job.render(plan_of(account, home))) == home


def test_a_daemon_runs_as_its_user_with_that_users_home(account: Account) -> None:
    job = keeper(account, Launchctl({}), system=True)
    plist = plistlib.loads(job.render(plan_of(account, Path("/h"))))
    assert plist["UserName"] == "me"
    assert plist["EnvironmentVariables"]["HOME"] == str(account.home)
    assert job.definition == Path(f"/Library/LaunchDaemons/{LABEL}.plist")
    agent = plistlib.loads(keeper(account, Launchctl({})).render(plan_of(account, Path("/h"))))
    assert {key: value for key, value in plist.items() if key not in ("UserName", "EnvironmentVariables")} == {
        key: value for key, value in agent.items() if key != "EnvironmentVariables"
    }


def test_what_runs_is_this_interpreter_by_its_absolute_path(account: Account, tmp_path: Path) -> None:
    from supervisor.paths import paths_of
    from supervisor.settings import Settings

    plan = service.plan_for(paths_of(tmp_path, Settings()), account)
    assert plan.command == (sys.executable, "-P", "-m", "supervisor.service_main")
    assert Path(plan.command[0]).is_absolute()
    assert "/usr/sbin" in plan.path.split(":")


def test_a_bootstrap_is_tried_again_while_the_former_job_is_leaving(account: Account) -> None:
    launchctl = Launchctl({"print": [MISSING], "bootstrap": [EIO, EIO, Ran(37), Ran(0)]})
    keeper(account, launchctl).start()
    assert launchctl.asked("bootstrap") == 4
    assert sum(launchctl.paused_s) >= 1


def test_a_bootstrap_that_fails_for_good_says_what_launchctl_said(account: Account) -> None:
    launchctl = Launchctl({"print": [MISSING], "bootstrap": [EIO]})
    with pytest.raises(KeeperFailed, match=r"bootstrap gui/.*Input/output error"):
        keeper(account, launchctl).start()
    assert 10 <= sum(launchctl.paused_s) <= 20


def test_without_anybody_logged_in_the_way_out_is_named_at_once(account: Account) -> None:
    launchctl = Launchctl({"print": [MISSING], "bootstrap": [Ran(125, err="Domain does not support specified action")]})
    with pytest.raises(KeeperFailed, match="omlxctl service install --system"):
        keeper(account, launchctl).start()
    assert launchctl.paused_s == []


def test_a_disabled_job_is_enabled_before_it_is_loaded(account: Account) -> None:
    launchctl = Launchctl({"print": [MISSING]})
    keeper(account, launchctl).start()
    verbs = [call[0] for call in launchctl.calls]
    assert verbs.index("enable") < verbs.index("bootstrap")


def test_a_loaded_job_that_has_ended_is_kicked_and_a_running_one_left_alone(account: Account) -> None:
    ended, running = Launchctl({"print": [Ran(0, ENDED)]}), Launchctl({"print": [Ran(0, RUNNING)]})
    keeper(account, ended).start()
    keeper(account, running).start()
    assert (ended.asked("kickstart"), ended.asked("bootstrap")) == (1, 0)
    assert [call[0] for call in running.calls] == ["print"]


def test_a_stop_returns_when_the_job_has_left(account: Account) -> None:
    launchctl = Launchctl({"bootout": [Ran(36)], "print": [Ran(0, RUNNING), Ran(0, RUNNING), MISSING]})
    keeper(account, launchctl).stop()
    assert launchctl.asked("print") == 3


def test_a_stop_of_what_is_not_loaded_is_no_error_and_a_refused_one_is(account: Account) -> None:
    keeper(account, Launchctl({"bootout": [Ran(3, err="No such process")], "print": [MISSING]})).stop()
    with pytest.raises(KeeperFailed, match="not privileged"):
        keeper(account, Launchctl({"bootout": [Ran(150, err="not privileged")]})).stop()


def test_a_job_that_never_leaves_is_given_up_after_more_than_its_exit_timeout(account: Account) -> None:
    launchctl = Launchctl({"print": [Ran(0, RUNNING)]})
    with pytest.raises(KeeperFailed, match="still there"):
        keeper(account, launchctl).stop()
    assert sum(launchctl.paused_s) > service.EXIT_TIMEOUT_S


def test_a_jobs_own_facts_are_read_and_not_those_of_its_endpoints() -> None:
    assert job_in(RUNNING) == Job(known=True, pid=44, last_exit="1")
    assert job_in(ENDED) == Job(known=True, pid=None, last_exit="0")
    assert job_in(FRESH) == Job(known=True, pid=None, last_exit=None)
    assert job_in(KILLED) == Job(known=True, pid=None, last_exit="Killed: 9")


def test_an_install_makes_home_log_and_definition_each_as_private_as_it_must_be(account: Account, tmp_path: Path) -> None:
    job = keeper(account, Launchctl({"bootout": [Ran(3)], "print": [MISSING]}))
    plan = plan_of(account, tmp_path / "new" / "home")
    assert service.install(job, plan) == "installed"
    assert stat.S_IMODE(plan.home.stat().st_mode) == 0o700
    assert stat.S_IMODE(plan.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(job.definition.stat().st_mode) == 0o644
    assert list(job.definition.parent.iterdir()) == [job.definition]


def test_an_install_that_changes_nothing_touches_neither_job_nor_file(account: Account, tmp_path: Path) -> None:
    launchctl = Launchctl({"bootout": [Ran(3)], "print": [MISSING, MISSING, Ran(0, RUNNING)]})
    job, plan = keeper(account, launchctl), plan_of(account, tmp_path / "home")
    service.install(job, plan)
    written, asked = job.definition.stat().st_ino, len(launchctl.calls)
    assert service.install(job, plan) == "unchanged"
    assert job.definition.stat().st_ino == written
    assert [call[0] for call in launchctl.calls[asked:]] == ["print"]


def test_a_changed_definition_is_loaded_only_after_the_old_job_has_left(account: Account, tmp_path: Path) -> None:
    launchctl = Launchctl({"print": [MISSING]})
    job = keeper(account, launchctl)
    service.install(job, plan_of(account, tmp_path / "one"))
    launchctl.calls.clear()
    launchctl.answers["print"] = [Ran(0, RUNNING), MISSING]
    assert service.install(job, plan_of(account, tmp_path / "two")) == "changed"
    assert [call[0] for call in launchctl.calls] == ["bootout", "print", "print", "print", "enable", "bootstrap"]
    assert job.home_in(job.definition.read_bytes()) == tmp_path / "two"


def test_an_uninstall_removes_the_definition_alone(account: Account, tmp_path: Path) -> None:
    job, plan = keeper(account, Launchctl({"print": [MISSING]})), plan_of(account, tmp_path / "home")
    service.install(job, plan)
    (plan.home / "settings.json").write_text("{}")
    assert service.uninstall(job)
    assert not job.definition.exists()
    assert (plan.home / "settings.json").exists() and plan.log.exists()
    assert not service.uninstall(job)
