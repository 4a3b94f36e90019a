"""launchd as far as a job of ours can tell, and launchctl in front of it: real processes, launchd's rules and its races.

A job gets the environment, limits, umask and directory of its property list and nothing else of the test's; its process group
dies with it; it is started again after a crash, no sooner than ThrottleInterval after the last start. A bootout returns before
the job has left. A property list that launchd would not take raises AssertionError.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import pwd
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from supervisor.service import Ran

KNOWN: dict[str, type] = {
    "Label": str,
    "UserName": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "ProcessType": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
OK, NO_SUCH_PROCESS, EIO, NOT_FOUND, NO_SUCH_DOMAIN = 0, 3, 5, 113, 125
EX_CONFIG = 78
LIMITED = 'ulimit -S -n "$1"; ulimit -H -n "$2"; shift 2; exec "$@"'
"""The limits are set between fork and exec, which Python cannot do safely beside other threads; the pid stays the same."""


class LaunchdStand:
    """One launchd. `launchctl` is the seam that `supervisor.service_launchd` calls; `calls` is what it was asked."""

    def __init__(self, *domains: str) -> None:
        self.calls: list[list[str]] = []
        self.jobs: dict[str, Job] = {}
        self._domains = domains
        self._disabled: set[str] = set()

    def launchctl(self, command: Sequence[str]) -> Ran:
        program, verb, *words = command
        assert program == "/bin/launchctl"
        self.calls.append([verb, *words])
        match verb, words:
            case "bootstrap", [domain, file]:
                return self._bootstrap(domain, Path(file))
            case "bootout", [target]:
                return self._bootout(target)
            case "kickstart", [target]:
                return self._kickstart(target)
            case "print", [target]:
                job = self._job(target)
                return Ran(OK, job.printed(target)) if job else _could_not_find(target)
            case "enable", [target]:
                self._disabled.discard(target)
                return Ran(OK)
            case "disable", [target]:
                self._disabled.add(target)
                return Ran(OK)
            case _:
                raise AssertionError(f"launchctl {command}")

    def close(self) -> None:
        for job in self.jobs.values():
            job.leave(at_once=True)
        for job in self.jobs.values():
            job.thread.join(10)

    def _bootstrap(self, domain: str, file: Path) -> Ran:
        if domain not in self._domains:
            return Ran(NO_SUCH_DOMAIN, err="Bootstrap failed: 125: Domain does not support specified action")
        assert not file.stat().st_mode & 0o022, "launchd refuses a file that others can write"
        job = Job(plistlib.loads(file.read_bytes()))
        target = f"{domain}/{job.label}"
        if self._job(target) or target in self._disabled:
            return Ran(
                EIO, err="Bootstrap failed: 5: Input/output error\nTry re-running the command as root for richer errors."
            )
        self.jobs[target] = job
        job.thread.start()
        return Ran(OK)

    def _bootout(self, target: str) -> Ran:
        job = self._job(target)
        if job is None:
            return Ran(NO_SUCH_PROCESS, err="Boot-out failed: 3: No such process")
        job.leave()
        return Ran(OK)

    def _kickstart(self, target: str) -> Ran:
        job = self._job(target)
        if job is None:
            return _could_not_find(target)
        job.kick()
        return Ran(OK)

    def _job(self, target: str) -> Job | None:
        job = self.jobs.get(target)
        return job if job is not None and not job.gone.is_set() else None


def _could_not_find(target: str) -> Ran:
    return Ran(NOT_FOUND, err=f"Bad request.\nCould not find service {target!r}")


class Job:
    """One loaded property list. `starts` holds the time of every start, `exits` how each of them ended."""

    def __init__(self, plist: dict[str, Any]) -> None:
        for key, value in plist.items():
            assert isinstance(value, KNOWN[key]), f"{key}: {value!r}"
        assert plist["KeepAlive"] == {"SuccessfulExit": False}
        assert plist["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
        self.plist = plist
        self.label: str = plist["Label"]
        self.process: subprocess.Popen[bytes] | None = None
        self.starts: list[float] = []
        self.exits: list[int] = []
        self.state: Literal["idle", "throttled", "running"] = "idle"
        self.gone = threading.Event()
        self._wanted = threading.Event()
        self._hurry = threading.Event()
        self._leaving = threading.Event()
        self._at_once = False
        self.thread = threading.Thread(target=self._live, daemon=True)
        if plist.get("RunAtLoad"):
            self._wanted.set()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.poll() is None else None

    def printed(self, target: str) -> str:
        pid = self.pid
        lines = [
            f"{target} = {{",
            "\tactive count = 1",
            "\ttype = LaunchAgent",
            f"\tstate = {'running' if pid else 'not running'}",
        ]
        lines += ["", "\tenvironment = {", "\t\tPATH => /bin", "\t}", "", f"\truns = {len(self.starts)}"]
        lines += [f"\tpid = {pid}"] if pid else []
        match self.exits[-1:]:
            case [int(code)] if code < 0:
                lines.append(f"\tlast terminating signal = {signal.strsignal(-code)}: {-code}")
            case [int(code)]:
                lines.append(f"\tlast exit code = {code}")
            case _:
                lines.append("\tlast exit code = (never exited)")
        return "\n".join([*lines, "\tendpoints = {", "\t\tpid = 1", "\t}", "}", ""])

    def kick(self) -> None:
        """Starts it at once, unless it runs."""
        if self.state != "running":
            self._hurry.set()
            self._wanted.set()

    def leave(self, at_once: bool = False) -> None:
        """SIGTERM, and SIGKILL after ExitTimeOut."""
        self._leaving.set()
        self._at_once |= at_once
        self._hurry.set()
        self._wanted.set()
        if (process := self.process) and process.poll() is None:
            process.send_signal(signal.SIGKILL if self._at_once else signal.SIGTERM)
            killer = threading.Timer(float(self.plist["ExitTimeOut"]), process.kill)
            killer.daemon = True
            killer.start()

    def _live(self) -> None:
        try:
            while self._wait_for_start():
                self._run()
        finally:
            self.gone.set()

    def _wait_for_start(self) -> bool:
        if not self._wanted.is_set():
            self.state = "idle"
        self._wanted.wait()
        self._wanted.clear()
        if self.starts:
            self.state = "throttled"
            self._hurry.wait(max(0.0, self.starts[-1] + float(self.plist["ThrottleInterval"]) - time.monotonic()))
        self._hurry.clear()
        return not self._leaving.is_set()

    def _run(self) -> None:
        self.starts.append(time.monotonic())
        code = self._run_process()
        if self._leaving.is_set() or code not in (0, EX_CONFIG):
            self._wanted.set()
        self.exits.append(code)

    def _run_process(self) -> int:
        out, err = (Path(self.plist[key]) for key in ("StandardOutPath", "StandardErrorPath"))
        if not (out.parent.is_dir() and Path(self.plist["WorkingDirectory"]).is_dir()):
            return EX_CONFIG
        with out.open("ab") as stdout, err.open("ab") as stderr:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", LIMITED, "launchd", *self._limits(), *self.plist["ProgramArguments"]],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self.plist["WorkingDirectory"],
                env=self._environment(),
                umask=self.plist["Umask"],
                user=self.plist.get("UserName"),
                process_group=0,
            )
        self.state = "running"
        if self._leaving.is_set():
            self.leave()
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def _limits(self) -> list[str]:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        wanted = [self.plist[key]["NumberOfFiles"] for key in ("SoftResourceLimits", "HardResourceLimits")]
        return [str(n if most == resource.RLIM_INFINITY else min(n, most)) for n in wanted]

    def _environment(self) -> dict[str, str]:
        user = pwd.getpwuid(os.getuid())
        given = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell, "TMPDIR": "/tmp"}
        return (
            given
            | {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "XPC_SERVICE_NAME": self.label}
            | self.plist["EnvironmentVariables"]
        )
