"""Keeps the machine from falling asleep by itself while requests run or wait: an answer that takes an hour must not be cut.

A program of the system holds that promise for as long as it runs, and ends with this process. Closing the lid, or sending the
machine to sleep by hand, still works.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.process import Child, Exit
from supervisor.settings_load import Loaded

log = logging.getLogger("omlxd")

LINGER_S = 30.0
"""An agent's next request comes soon after the last answer: the promise is not taken back and given again in between."""
RETRY_S = 600.0
"""After a program that did not stay: where nothing manages sleep, asking more often helps nobody."""
CAFFEINATE = "/usr/bin/caffeinate"
"""Absolute: not every PATH holds it."""


def command_for(platform: str, pid: int, find: Callable[[str], str | None] = shutil.which) -> Sequence[str] | None:
    """What holds idle sleep off until it, or process `pid`, ends; None where there is nothing for it."""
    if platform == "darwin":
        return CAFFEINATE, "-i", "-w", str(pid)
    inhibit, tail = find("systemd-inhibit"), find("tail")
    if inhibit is None or tail is None:
        return None
    why = ("--what=idle", "--who=omlxd", "--why=requests are being answered")
    return inhibit, *why, tail, f"--pid={pid}", "-f", os.devnull


class AwakeShell(Protocol):
    loaded: Loaded
    census: Census

    def book(self, name: str) -> LogBook: ...


class StayAwake:
    def __init__(self, shell: AwakeShell, command: Sequence[str] | None = None, linger_s: float = LINGER_S) -> None:
        self._shell = shell
        self._command = command or command_for(sys.platform, os.getpid())
        self._linger_s = linger_s
        self._holder: Child | None = None
        self._letting_go: asyncio.TimerHandle | None = None
        self._not_before = 0.0

    @property
    def pid(self) -> int | None:
        return self._holder.pid if self._holder else None

    def demand(self, requests: int) -> None:
        """How many requests run or wait now."""
        if requests and self._shell.loaded.settings.server.stay_awake:
            self._stay()
        elif self._holder is not None and self._letting_go is None:
            self._letting_go = asyncio.get_running_loop().call_later(self._linger_s, self.let_go)

    def let_go(self) -> None:
        self._keep()
        if self._holder is not None:
            self._holder.signal(signal.SIGTERM)

    def _stay(self) -> None:
        self._keep()
        if self._holder is not None or self._command is None or time.monotonic() < self._not_before:
            return
        command = self._command
        self._not_before = time.monotonic() + RETRY_S
        try:
            self._holder = Child(self._shell.book("omlxd"), self._shell.census, self._ended, command=lambda _lifeline: command)
        except OSError as e:
            log.info("the machine may fall asleep while requests run: %s: %s", command[0], e.strerror)

    def _keep(self) -> None:
        if self._letting_go is not None:
            self._letting_go.cancel()
            self._letting_go = None

    def _ended(self, how: Exit) -> None:
        self._holder = None
        if how.signal == signal.SIGTERM:
            self._not_before = 0.0
        else:
            log.info("the machine may fall asleep while requests run: %s ended with %s", (self._command or ("?",))[0], how)
