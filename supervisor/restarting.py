"""Whether the server is to be started again in place, and when: at once if somebody asks, when idle after an upgrade.

An upgrade under a running server shows in a child of another build. From then on nothing is spawned; what is loaded goes on
answering, and with the last answer the server makes place for the new one.
"""

import logging
import os
import time
from dataclasses import dataclass
from typing import Protocol

from supervisor import slot_events as slots
from supervisor.build import build
from supervisor.protocol import EventKind
from supervisor.roster import Roster
from supervisor.settings import Settings
from supervisor.settings_load import Loaded, SettingsInvalid, load
from supervisor.settings_reload import flags_of

log = logging.getLogger("omlxd")

RETRY_S = 5.0
"""Between looks at settings that would keep the new server from starting."""


@dataclass(frozen=True, slots=True)
class Again:
    build: str | None
    """What is expected of the next life; None when somebody asked."""


@dataclass(frozen=True, slots=True)
class End:
    exit_code: int
    again: Again | None = None


class RestartingShell(Protocol):
    loaded: Loaded

    @property
    def quiet(self) -> bool: ...
    def happened(self, event: slots.SlotEvent) -> None: ...
    def publish(self, kind: EventKind, data: dict[str, object]) -> None: ...
    def all_warnings(self) -> list[str]: ...
    def leave(self) -> None: ...
    def roster_for(self, settings: Settings) -> Roster: ...


class Restarting:
    def __init__(self, shell: RestartingShell, tried_build: str | None) -> None:
        """`tried_build`: the one this life was begun for."""
        self._shell = shell
        self._tried_build = tried_build
        self._other_build: str | None = None
        self._problem = ""
        self._not_before = 0.0
        self.again: Again | None = None

    @property
    def needed(self) -> str:
        """Why the server is to be started again; empty while it is not."""
        if self._other_build is None:
            return ""
        return f"omlxd {self._other_build} is installed, {build()} runs"

    def warnings(self) -> list[str]:
        if not self.needed:
            return []
        when = f"once the settings are valid ({self._problem})" if self._problem else "as soon as running answers have ended"
        return [f"restart needed: {self.needed}; nothing is loaded any more. It restarts by itself {when}"]

    def other_build(self, other: str, model: str | None = None, gen: int = 0) -> bool:
        """A child is of that build, perhaps the worker of a model. False if starting again has not helped before."""
        if other == self._tried_build:
            return False
        if self._other_build is None:
            self._other_build = other
            log.warning("%s", self.warnings()[0])
            self._shell.publish(EventKind.SERVER, {"warnings": self._shell.all_warnings()})
        self._shell.happened(slots.SpawnsHeld(f"{self.needed}; it restarts as soon as running answers have ended", model, gen))
        self.look()
        return True

    def look(self) -> None:
        """Nothing runs or waits any more?"""
        if self._other_build is None or self.again is not None or not self._shell.quiet or time.monotonic() < self._not_before:
            return
        try:
            self.ask(self._other_build)
        except SettingsInvalid as e:
            self._not_before = time.monotonic() + RETRY_S
            if not self._problem:
                log.error("it cannot start again: the settings are not valid: %s", e)
            self._problem = str(e)

    def ask(self, for_build: str | None = None) -> None:
        """Begins the end of this life. Raises `SettingsInvalid` when the next one could not begin."""
        loaded = self._shell.loaded
        fresh = load(os.environ, flags_of(loaded), loaded.home)
        if problems := self._shell.roster_for(fresh.settings).clashes():
            raise SettingsInvalid(problems)
        log.info("starting again in place%s", f", as omlxd {for_build}" if for_build else "")
        self._shell.leave()
        self.again = Again(for_build)
