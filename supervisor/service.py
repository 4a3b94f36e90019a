"""omlxd as a service of this machine: what is to be run, and how a service is installed, started, stopped and removed.

Who keeps it alive, launchd or systemd, is behind `Keeper`. Touches the definition file and makes the directories that must be
there before the start; models, cache and settings are none of its business.
"""

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from supervisor.paths import Paths

EXIT_TIMEOUT_S = 30
"""Between SIGTERM and SIGKILL; the server's own shutdown fits in 25 s."""
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
COMMAND_S = 90.0
"""launchctl and systemctl wait for a stop themselves, up to the exit timeout."""


class KeeperMissing(Exception):
    """Nothing here keeps services alive, or it does not let us."""


class KeeperFailed(Exception):
    """launchctl or systemctl said no."""

    def __init__(self, command: Sequence[str], ran: "Ran", hint: str = "") -> None:
        said = (ran.err or ran.out).strip() or f"exit code {ran.code}"
        super().__init__(f"{' '.join(command)}: {said}" + (f"\n{hint}" if hint else ""))


class DirectoryUnusable(Exception):
    """A directory or file that the service needs from the start cannot be made."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended and what it printed."""

    code: int
    out: str = ""
    err: str = ""


Run = Callable[[Sequence[str]], Ran]
"""The seam to launchctl and systemctl."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whose service it is."""

    name: str
    uid: int
    gid: int
    home: Path


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Everything a definition is made of."""

    command: tuple[str, ...]
    home: Path
    """OMLX_HOME, and the working directory."""
    log: Path
    """Takes standard output and standard error."""
    path: str
    """$PATH"""
    account: Account


@dataclass(frozen=True, slots=True)
class Job:
    """What the keeper says about the service now."""

    known: bool
    pid: int | None = None
    last_exit: str | None = None
    """`0`, `1`, `78: EX_CONFIG`, …; None when it has not ended yet."""


class Keeper(Protocol):
    definition: Path
    """The file that makes the service known."""
    lasting: str
    """From when to when the service runs."""

    def require(self) -> None:
        """Raises `KeeperMissing` where there is no such thing on this machine."""
        ...

    def render(self, plan: ServicePlan) -> bytes: ...
    def home_in(self, definition: bytes) -> Path | None:
        """The OMLX_HOME that a definition names."""
        ...

    def job(self) -> Job: ...
    def enroll(self) -> None:
        """The definition is new or has changed; the service does not run."""
        ...

    def start(self) -> None:
        """Nothing happens when it runs already."""
        ...

    def stop(self) -> None:
        """Returns when its process is gone. Nothing happens when it does not run."""
        ...

    def withdraw(self) -> None:
        """Before the definition is deleted; the service does not run."""
        ...

    def forget(self) -> None:
        """After the definition was deleted."""
        ...


Outcome = Literal["installed", "changed", "unchanged"]


def run_command(command: Sequence[str]) -> Ran:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S)
    except FileNotFoundError as e:
        raise KeeperMissing(f"{command[0]} is not on this machine") from e
    except subprocess.TimeoutExpired as e:
        raise KeeperFailed(command, Ran(124, err=f"no answer within {COMMAND_S:.0f} s")) from e
    return Ran(done.returncode, done.stdout, done.stderr)


def account_of(name: str | None = None) -> Account:
    """The account of that name, by default of this process. Raises KeyError when there is none."""
    entry = pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, Path(entry.pw_dir))


def log_of(paths: Paths) -> Path:
    """What a service prints. Not `*.log`: the server deletes logs that are silent for long, and this one stays open."""
    return paths.logs / "service.out"


def plan_for(paths: Paths, account: Account) -> ServicePlan:
    """Runs this very installation: the interpreter by its absolute path, deaf to modules in the working directory."""
    return ServicePlan(
        command=(sys.executable, "-P", "-m", "supervisor.service_main"),
        home=paths.home,
        log=log_of(paths),
        path=":".join((str(Path(sys.executable).parent), *SYSTEM_PATH)),
        account=account,
    )


def install(keeper: Keeper, plan: ServicePlan) -> Outcome:
    """Makes the service known and starts it. A service that already runs from the same definition is left alone."""
    keeper.require()
    _make_ready(plan)
    wanted, found = keeper.render(plan), definition_of(keeper)
    if wanted != found:
        keeper.stop()
        _write(keeper.definition, wanted)
        keeper.enroll()
    keeper.start()
    if found is None:
        return "installed"
    return "unchanged" if wanted == found else "changed"


def uninstall(keeper: Keeper) -> bool:
    """Stops the service and makes it unknown; False when it was not installed."""
    keeper.require()
    keeper.stop()
    if not keeper.definition.exists():
        return False
    keeper.withdraw()
    keeper.definition.unlink(missing_ok=True)
    keeper.forget()
    return True


def definition_of(keeper: Keeper) -> bytes | None:
    """None when the service is not installed."""
    try:
        return keeper.definition.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    """In one step, and readable by all: launchd refuses a definition that others could have written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DirectoryUnusable(f"{path.parent} cannot be made: {e.strerror}") from e
    fd, name = tempfile.mkstemp(prefix=".omlxd-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _make_ready(plan: ServicePlan) -> None:
    """launchd does not start a job whose working directory is missing or whose log cannot be opened. Both are made private."""
    made: list[Path] = []
    try:
        for directory in (plan.home, plan.log.parent):
            made += [place for place in (directory, *directory.parents) if not place.exists()]
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not plan.log.exists():
            plan.log.touch(0o600)
            made.append(plan.log)
        if os.geteuid() != plan.account.uid:  # root makes it for somebody else
            for place in made:
                os.chown(place, plan.account.uid, plan.account.gid)
    except OSError as e:
        raise DirectoryUnusable(f"{e.filename} cannot be made: {e.strerror}") from e
