"""All attendants together: started and dismissed as one, told of new settings, and who is on duty follows from the settings."""

import asyncio
import logging
from typing import Protocol, cast

from supervisor import duties
from supervisor.attendants import Attendant, Duty
from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.paths import Paths
from supervisor.protocol import ChildStatus, EventKind, Message, Stop, plain
from supervisor.settings_load import Loaded

log = logging.getLogger("staff")

GATEWAY = "gateway"
GRACE_S = 1.0
GATEWAY_GRACE_S = 3.0


class StaffShell(Protocol):
    """What the staff needs of the supervisor around it."""

    loaded: Loaded
    paths: Paths
    census: Census

    def send(self, identity: bytes, message: Message) -> bool: ...
    def book(self, name: str) -> LogBook: ...
    def publish(self, kind: EventKind, data: dict[str, object]) -> None: ...
    def attendant_lost(self, identity: str) -> None: ...
    def give_up(self, reason: str) -> None: ...
    def janitor_said(self, data: bytes) -> None: ...


class Staff:
    def __init__(self, shell: StaffShell, http_fd: int) -> None:
        self._shell = shell
        self._http_fd = http_fd
        self._leaving: set[asyncio.Task[None]] = set()
        self.attendants = {duty.name: self._engaged(duty) for duty in self._duties()}

    def start(self) -> None:
        for attendant in self.attendants.values():
            attendant.start()

    def of(self, identity: bytes) -> Attendant | None:
        """None also for one that is gone: what it had still sent must not undo that all it held was taken back."""
        return next((a for a in self.attendants.values() if a.identity == identity and a.pid is not None), None)

    def identity(self, name: str) -> bytes:
        return self.attendants[name].identity

    def status(self) -> list[ChildStatus]:
        return [attendant.status() for attendant in self.attendants.values()]

    def assign(self, attendant: Attendant) -> None:
        """Tells an attendant what it is for; a second time when settings changed that take effect at once."""
        self._shell.send(attendant.identity, duties.assignment(attendant.duty, self._shell.loaded.settings, self._shell.paths))

    def settings_changed(self) -> None:
        """A cache that is switched on needs its janitor, and the other way round."""
        wanted = {duty.name: duty for duty in self._duties()}
        for name in [name for name in self.attendants if name not in wanted]:
            task = asyncio.create_task(self.attendants.pop(name).leave(GRACE_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for name, duty in wanted.items():
            if name not in self.attendants:
                self.attendants[name] = self._engaged(duty)
                self.attendants[name].start()
        for attendant in self.attendants.values():
            if attendant.hello:
                self.assign(attendant)

    async def renew(self, name: str) -> int | None:
        """Another process for that duty, its pid once it reports. The gateway first ends its streams with an error."""
        attendant = self.attendants[name]
        if attendant.hello:
            self._shell.send(attendant.identity, Stop(reason=f"{name} is started again", flush_deadline_s=2.0))
        await attendant.renew(GATEWAY_GRACE_S if name == GATEWAY else GRACE_S)
        return attendant.pid if await attendant.running() else None

    def dismiss(self) -> None:
        """The beginning of the end: nobody is started again, and the gateway ends its streams and leaves."""
        for attendant in self.attendants.values():
            attendant.dismiss()
        self._shell.send(self.identity(GATEWAY), Stop(reason="the server is shutting down", flush_deadline_s=2.0))

    async def leave(self, gateway_s: float) -> None:
        """The gateway gets that long to go by itself; then all are made to."""
        await self.attendants[GATEWAY].gone(within_s=gateway_s)
        await asyncio.gather(*self._leaving, *(attendant.leave(GRACE_S) for attendant in self.attendants.values()))

    def _duties(self) -> list[Duty]:
        return duties.duties(self._shell.loaded.settings, self._shell.paths, self._http_fd, self._shell.janitor_said)

    def _engaged(self, duty: Duty) -> Attendant:
        timers = self._shell.loaded.settings.timers
        return Attendant(
            duty,
            self._shell.book(duty.name),
            self._shell.census,
            hello_s=timers.hello_s,
            beat_lost_s=timers.beat_lost_s,
            on_lost=self._shell.attendant_lost,
            on_change=self._changed,
            give_up=self._shell.give_up,
        )

    def _changed(self, status: ChildStatus) -> None:
        self._shell.publish(EventKind.CHILD, cast("dict[str, object]", plain(status)))
