"""launchd as the keeper: the property lists from the templates in launchd/, and what launchctl has to be asked.

Knows launchd's races: `bootout` returns before the job has left its domain, and `bootstrap` into that time fails with EIO.
"""

import importlib.resources
import plistlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from supervisor.service import EXIT_TIMEOUT_S, Account, Job, KeeperFailed, Ran, Run, ServicePlan, run_command

LABEL = "org.omlxd.server"
LAUNCHCTL = "/bin/launchctl"
"""Absolute: not every PATH holds it."""

EIO, ALREADY_IN_PROGRESS = 5, 37
RACES = (EIO, ALREADY_IN_PROGRESS)
NOT_LOADED = (3, 113)
IN_PROGRESS = 36
NO_SUCH_DOMAIN = (112, 125)
BOOTSTRAP_PAUSES_S = (0.2, 0.5, 1.0, *(2.0,) * 7)
"""Bootstrap was seen to fail for 3 to 5 s after a bootout."""
LEAVING_S = EXIT_TIMEOUT_S + 10.0
LOOK_S = 0.1

Plist = str | int | bool | list["Plist"] | dict[str, "Plist"]


class Launchd:
    """One job: a LaunchAgent of the account, or a LaunchDaemon of the machine."""

    def __init__(
        self,
        account: Account,
        *,
        system: bool,
        run: Run = run_command,
        pause: Callable[[float], None] = time.sleep,
        root: Path = Path("/"),
    ) -> None:
        """`root` is where /Library is."""
        self.system = system
        self._domain = "system" if system else f"gui/{account.uid}"
        library = root / "Library/LaunchDaemons" if system else account.home / "Library/LaunchAgents"
        self.definition = library / f"{LABEL}.plist"
        self.lasting = "from the start of the machine on" if system else "while you are logged in"
        self._run = run
        self._pause = pause

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"

    def require(self) -> None:
        """launchd is there wherever macOS is."""

    def render(self, plan: ServicePlan) -> bytes:
        template = importlib.resources.files("launchd").joinpath("daemon.plist" if self.system else "agent.plist")
        values: dict[str, Plist] = {
            "@LABEL@": LABEL,
            "@COMMAND@": list(plan.command),
            "@HOME@": str(plan.home),
            "@LOG@": str(plan.log),
            "@PATH@": plan.path,
            "@USER@": plan.account.name,
            "@USER_HOME@": str(plan.account.home),
        }
        return plistlib.dumps(cast("dict[str, Plist]", _filled(_parsed(template.read_bytes()), values)), sort_keys=False)

    def home_in(self, definition: bytes) -> Path | None:
        try:
            match _parsed(definition):
                case {"EnvironmentVariables": {"OMLX_HOME": str(home)}}:
                    return Path(home)
                case _:
                    return None
        except (plistlib.InvalidFileException, ValueError):
            return None

    def job(self) -> Job:
        ran = self._launchctl("print", self._target)
        return job_in(ran.out) if ran.code == 0 else Job(known=False)

    def enroll(self) -> None:
        """launchd reads the file when the job is loaded."""

    def start(self) -> None:
        job = self.job()
        if not job.known:
            self._bootstrap()
        elif job.pid is None:
            self._must("kickstart", self._target)

    def stop(self) -> None:
        """The job leaves its domain; it comes back with `start`, or by itself with the next login or start of the machine."""
        ran = self._launchctl("bootout", self._target)
        if ran.code not in (0, IN_PROGRESS, *NOT_LOADED):
            raise KeeperFailed((LAUNCHCTL, "bootout", self._target), ran)
        for _ in range(int(LEAVING_S / LOOK_S)):
            if not self.job().known:
                return
            self._pause(LOOK_S)
        raise KeeperFailed((LAUNCHCTL, "bootout", self._target), Ran(1, err=f"the job is still there after {LEAVING_S:.0f} s"))

    def withdraw(self) -> None:
        """Stopping was enough."""

    def forget(self) -> None:
        """Nor does launchd remember a job without its file."""

    def _bootstrap(self) -> None:
        self._launchctl("enable", self._target)  # a job that was disabled by hand fails with EIO and no reason
        arguments = ("bootstrap", self._domain, str(self.definition))
        for pause_s in BOOTSTRAP_PAUSES_S:
            ran = self._launchctl(*arguments)
            if ran.code not in RACES:
                break
            self._pause(pause_s)
        else:
            ran = self._launchctl(*arguments)
        if ran.code != 0:
            no_session = ran.code in NO_SUCH_DOMAIN and not self.system
            hint = "nobody is logged in at the screen; to run without a login: omlxctl service install --system"
            raise KeeperFailed((LAUNCHCTL, *arguments), ran, hint if no_session else "")

    def _must(self, *arguments: str) -> None:
        ran = self._launchctl(*arguments)
        if ran.code != 0:
            raise KeeperFailed((LAUNCHCTL, *arguments), ran)

    def _launchctl(self, *arguments: str) -> Ran:
        return self._run((LAUNCHCTL, *arguments))


def job_in(printed: str) -> Job:
    """What `launchctl print` says of a job: facts at one tab, those of its endpoints and the like deeper."""
    facts = dict(cast("list[tuple[str, str]]", re.findall(r"^\t([a-z ]+) = (.*)$", printed, re.MULTILINE)))
    pid, last_exit = facts.get("pid", ""), facts.get("last exit code", "")
    ended = last_exit if last_exit and "never" not in last_exit else None
    signal = facts.get("last terminating signal")
    return Job(known=True, pid=int(pid) if pid.isdigit() else None, last_exit=ended or signal)


def _parsed(definition: bytes) -> Plist:
    return cast("Plist", plistlib.loads(definition))


def _filled(node: Plist, values: Mapping[str, Plist]) -> Plist:
    match node:
        case dict():
            return {key: _filled(value, values) for key, value in node.items()}
        case str():
            return values.get(node, node)
        case _:
            return node
