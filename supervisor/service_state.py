"""The service as it is installed: which home it serves, what it printed, and whether its server answers. Changes nothing."""

import contextlib
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from supervisor.client import CallFailed, ControlClient, NoAnswer, NotRunning
from supervisor.instance import running_pid
from supervisor.paths import Paths, paths_of
from supervisor.protocol import ServerStatus
from supervisor.service import Keeper, definition_of, log_of
from supervisor.settings import Settings
from supervisor.settings_load import SettingsInvalid, load

ANSWERS_S = 20.0
"""A start takes 2 s; one after a kill waits for the orphans as well."""
SPAWNED_S = 1.0
"""Until then a keeper may still be showing how the service ended the time before."""
LOOK_S = 0.1
LAST_LINES = 10


class NotInstalled(Exception):
    """There is no definition, or none of ours."""


class DidNotCome(Exception):
    """The service was started and does not answer; the message ends with what it printed."""


@dataclass(frozen=True)
class Service:
    """What its definition says holds, whatever OMLX_HOME is in this shell."""

    keeper: Keeper

    @property
    def installed(self) -> bool:
        return definition_of(self.keeper) is not None

    @cached_property
    def paths(self) -> Paths:
        """Raises `NotInstalled`."""
        definition = definition_of(self.keeper)
        if definition is None:
            raise NotInstalled(f"the service is not installed: {self.keeper.definition} is not there")
        home = self.keeper.home_in(definition)
        if home is None:
            raise NotInstalled(f"{self.keeper.definition} names no OMLX_HOME; write it anew with: omlxctl service install")
        return paths_as_service(home)

    @property
    def log(self) -> Path:
        return log_of(self.paths)

    def serving_pid(self) -> int | None:
        """The pid of the service's server once nothing can refuse its start any more; never of another server in its place."""
        pid = self.keeper.job().pid
        held = pid is not None and running_pid(self.paths.lock) == pid
        return pid if held and self.paths.control.exists() else None

    def answer(self) -> ServerStatus | None:
        """What the service's server says; None while it does not run or answer, or may not answer us."""
        if self.serving_pid() is None or self._is_others:
            return None
        with (
            contextlib.suppress(NotRunning, NoAnswer, CallFailed),
            ControlClient(self.paths.lock, self.paths.control) as client,
        ):
            return msgspec.convert(client.call("status"), ServerStatus)
        return None

    @property
    def _is_others(self) -> bool:
        """A control socket talks to its own user only, not even to root."""
        try:
            return self.paths.control.stat().st_uid != os.geteuid()
        except OSError:
            return False

    def said(self, since_bytes: int = 0) -> list[str]:
        """The last lines it printed after its log was that long."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(since_bytes)
            return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
        return []

    def wait_until_it_serves(self, since_bytes: int) -> None:
        """Raises `DidNotCome` with what it printed after its log was that long."""
        begun = time.monotonic()
        while self.serving_pid() is None or not (self._is_others or self.answer()):
            job = self.keeper.job()
            waited_s = time.monotonic() - begun
            if job.pid is None and job.last_exit is not None and waited_s > SPAWNED_S:
                raise DidNotCome("\n  ".join([f"the service has ended ({job.last_exit}):", *self._words(since_bytes)]))
            if waited_s > ANSWERS_S:
                state = f"runs (pid {job.pid}) but does not answer" if job.pid else "does not run"
                raise DidNotCome("\n  ".join([f"the service {state} after {ANSWERS_S:.0f} s:", *self._words(since_bytes)]))
            time.sleep(LOOK_S)

    def _words(self, since_bytes: int) -> list[str]:
        return self.said(since_bytes) or [f"it left no word in {self.log}"]


def paths_as_service(home: Path) -> Paths:
    """The directories as the server will find them: by the settings file alone, since a service sees nothing of a shell."""
    try:
        return paths_of(home, load({}, None, home).settings)
    except SettingsInvalid:
        return paths_of(home, Settings())


def size_bytes(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
