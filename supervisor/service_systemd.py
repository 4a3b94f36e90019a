"""systemd as the keeper: the unit file, and what systemctl has to be asked."""

import re
from pathlib import Path

from supervisor.service import EXIT_TIMEOUT_S, Account, Job, KeeperFailed, KeeperMissing, Ran, Run, ServicePlan, run_command

UNIT = "omlxd.service"
BOOTED = Path("/run/systemd/system")
"""There only while systemd runs the machine, see sd_booted(3)."""
HOME_KEY = "OMLX_HOME="


class Systemd:
    """One unit: of the account's own systemd, or of the machine's."""

    def __init__(
        self,
        account: Account,
        *,
        system: bool,
        run: Run = run_command,
        root: Path = Path("/"),
        booted: Path = BOOTED,
    ) -> None:
        self.system = system
        self.definition = (root / "etc/systemd/system" if system else account.home / ".config/systemd/user") / UNIT
        self.lasting = (
            "from the start of the machine on"
            if system
            else f"while you are logged in (from the start of the machine on: loginctl enable-linger {account.name})"
        )
        self._scope = () if system else ("--user",)
        self._run = run
        self._booted = booted

    def require(self) -> None:
        instead = "let whatever starts programs on this machine run: omlxctl serve"
        if not self._booted.is_dir():
            raise KeeperMissing(f"systemd does not run this machine ({self._booted} is not there); {instead}")
        ran = self._systemctl("show", "--property=Version")
        if ran.code != 0:
            whose = (
                "systemd" if self.system else "your user's systemd (a session made by su or cron has none; log in as that user)"
            )
            raise KeeperMissing(f"{whose} cannot be reached: {ran.err.strip()}; or {instead}")

    def render(self, plan: ServicePlan) -> bytes:
        return "\n".join(
            [
                "# Written by: omlxctl service install",
                "[Unit]",
                "Description=omlxd, a local server for language models",
                "After=network.target",
                "",
                "[Service]",
                "Type=exec",
                *([f"User={plan.account.name}"] if self.system else []),
                f"ExecStart={' '.join(_argument(word) for word in plan.command)}",
                f"WorkingDirectory={_literal(str(plan.home))}",
                f"Environment={_quoted(HOME_KEY + str(plan.home))}",
                f"Environment={_quoted('PATH=' + plan.path)}",
                "# Exit code 0 means that starting again would not help.",
                "Restart=on-failure",
                "RestartSec=10",
                "# SIGTERM goes to the supervisor alone: it lets answers end and workers save their KV blocks.",
                "KillMode=mixed",
                f"TimeoutStopSec={EXIT_TIMEOUT_S}",
                "# A worker that the kernel kills for its memory is replaced; the others go on.",
                "OOMPolicy=continue",
                "LimitNOFILE=10240:20480",
                "UMask=0077",
                f"StandardOutput=append:{_literal(str(plan.log))}",
                f"StandardError=append:{_literal(str(plan.log))}",
                "",
                "[Install]",
                f"WantedBy={'multi-user' if self.system else 'default'}.target",
                "",
            ]
        ).encode()

    def home_in(self, definition: bytes) -> Path | None:
        begin = f'Environment="{HOME_KEY}'
        for line in definition.decode("utf-8", "replace").splitlines():
            if line.startswith(begin) and line.endswith('"'):
                return Path(_unquoted(line[len(begin) : -1]))
        return None

    def job(self) -> Job:
        ran = self._systemctl("show", UNIT, "--property=LoadState,MainPID,ActiveState,ExecMainStatus,ExecMainExitTimestamp")
        facts = {key: value for key, _, value in (line.partition("=") for line in ran.out.splitlines())}
        pid = facts.get("MainPID", "0")
        ended = facts.get("ExecMainStatus") if facts.get("ExecMainExitTimestamp") else None
        return Job(
            known=ran.code == 0 and facts.get("LoadState") == "loaded",
            pid=int(pid) if pid.isdigit() and pid != "0" else None,
            last_exit=ended,
        )

    def enroll(self) -> None:
        self._must("daemon-reload")
        self._must("enable", UNIT)

    def start(self) -> None:
        self._must("start", UNIT)

    def stop(self) -> None:
        if self.job().known:
            self._must("stop", UNIT)

    def withdraw(self) -> None:
        self._must("disable", UNIT)

    def forget(self) -> None:
        self._must("daemon-reload")

    def _must(self, *arguments: str) -> None:
        ran = self._systemctl(*arguments)
        if ran.code != 0:
            raise KeeperFailed(("systemctl", *self._scope, *arguments), ran)

    def _systemctl(self, *arguments: str) -> Ran:
        return self._run(("systemctl", *self._scope, *arguments))


def _literal(text: str) -> str:
    """A value to the end of the line, in which % begins a specifier."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return '"' + _literal(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text).replace("%%", "%")


def _argument(word: str) -> str:
    """A word of a command line, in which $ begins a variable as well."""
    return _quoted(word).replace("$", "$$")
