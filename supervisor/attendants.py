"""The processes that are not workers of a model: gateway, text worker, janitor. Each is started again when it dies, ever later.

The gateway is the one that cannot be done without: five deaths in a minute end the server. One that says nothing for too long
hangs, and is killed to be started again.
"""

import asyncio
import logging
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.process import Child, Exit
from supervisor.protocol import ChildStatus

log = logging.getLogger("attendants")

WINDOW_S = 60.0
DEATHS_ALLOWED = 5
SOON_S = 0.05
"""The first restart comes at once: a gateway that is gone is noticed by every client."""
LONGEST_PAUSE_S = 30.0
DOUBT_S = 2.0
"""A process that seems silent is heard once more: it may be this one that slept and has not read what has come meanwhile."""
REAPED_S = 2.0
"""After SIGKILL; a process that a broken device holds in the kernel must not hold up the end of the server."""


@dataclass(frozen=True, slots=True)
class Duty:
    """How an attendant is started: `command` gets its identity, nonce and lifeline and returns the whole command line."""

    name: str
    identity_prefix: str
    command: Callable[[str, str, int], Sequence[str]]
    fds: tuple[int, ...] = ()
    on_output: Callable[[bytes], None] | None = None
    """Gets its standard output, if that is not just for the log."""
    greets: bool = True
    """Whether it says hello on the control socket; the janitor does not."""
    indispensable: bool = False


def pause_after(deaths_in_window: int, first_s: float = SOON_S) -> float:
    """Seconds until the next start: at once, then 1, 2, 4 … seconds."""
    if deaths_in_window <= 1:
        return first_s
    return min(LONGEST_PAUSE_S, 2.0 ** (deaths_in_window - 2))


class Attendant:
    """One duty and the process that does it now."""

    def __init__(
        self,
        duty: Duty,
        book: LogBook,
        census: Census,
        *,
        hello_s: float,
        beat_lost_s: float,
        on_lost: Callable[[str], None],
        on_change: Callable[[ChildStatus], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.duty = duty
        self.identity = b""
        self.nonce = ""
        self.hello = False
        self._book = book
        self._census = census
        self._hello_s = hello_s
        self._beat_lost_s = beat_lost_s
        self._heard_at = 0.0
        self._doubted = False
        self._silence: asyncio.TimerHandle | None = None
        self._on_lost = on_lost
        self._on_change = on_change
        self._give_up = give_up
        self._child: Child | None = None
        self._gen = 0
        self._deaths: deque[float] = deque()
        self._since = time.time()
        self._retry: asyncio.TimerHandle | None = None
        self._leaving = False
        self._renewed = False
        self._gone = asyncio.Event()
        self._up = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> None:
        self._retry = None
        self._renewed = False
        self._gen += 1
        identity, self.nonce, self.hello = f"{self.duty.identity_prefix}.{self._gen}", secrets.token_hex(16), False
        self.identity = identity.encode()
        self._gone.clear()
        command = self.duty.command
        try:
            self._child = Child(
                self._book,
                self._census,
                self._exited,
                command=lambda lifeline: command(identity, self.nonce, lifeline),
                fds=self.duty.fds,
                on_output=self.duty.on_output,
            )
        except OSError as e:
            self._book.say(f"could not be started: {e}")
            self._exited(Exit(71, None))
            return
        log.info("%s: process %d started", self.duty.name, self._child.pid)
        if self.duty.greets:
            self.heard()
            self._listen()
        else:
            self._up.set()
        self._changed()

    def greeted(self) -> None:
        self.hello = True
        self._up.set()
        self.heard()
        self._listen()
        self._changed()

    def tell(self, line: bytes) -> bool:
        """An order for one that takes them on its lifeline; False when nobody is there to read it."""
        return self._child is not None and self._child.tell(line)

    def heard(self) -> None:
        """It has said something."""
        self._heard_at = time.monotonic()
        self._doubted = False

    def refuse(self, reason: str) -> None:
        """It is not what it should be, and is killed for it: that counts as a death like any other."""
        log.error("%s: %s", self.duty.name, reason)
        self._book.say(reason)
        if self._child is not None:
            self._child.kill()

    def status(self) -> ChildStatus:
        up = self._child is not None and (self.hello or not self.duty.greets)
        state = "running" if up else "starting" if self._child else "stopped" if self._leaving else "backoff"
        return ChildStatus(name=self.duty.name, state=state, pid=self.pid, restarts=max(0, self._gen - 1), since=self._since)

    async def renew(self, grace_s: float) -> None:
        """Another process takes over: this one, which may have been asked by message already, gets so long to go by itself."""
        if self._child is None:
            if self._retry is not None:
                self._retry.cancel()
                self.start()
            return
        self._renewed = True
        going = self._child
        if not await self.gone(grace_s):
            going.signal(signal.SIGTERM)
        if not await self.gone(grace_s):
            going.kill()
            await self.gone(REAPED_S)

    async def running(self) -> bool:
        """Whether it reports for duty in time."""
        try:
            await asyncio.wait_for(self._up.wait(), self._hello_s)
        except TimeoutError:
            return False
        return True

    def dump_stacks(self) -> bool:
        """Into its log; False if it is not there or not far enough to take the signal."""
        if self._child is None or not self.hello:
            return False
        self._child.signal(signal.SIGUSR1)
        return True

    def dismiss(self) -> None:
        """From now on its end is expected and it is not started again."""
        self._leaving = True
        if self._retry is not None:
            self._retry.cancel()

    async def leave(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the process is gone. Whoever can is asked by message before."""
        self.dismiss()
        if self._child is None:
            return
        try:
            self._child.signal(signal.SIGTERM)
            await asyncio.wait_for(self._gone.wait(), grace_s)
        except TimeoutError:
            log.warning("%s: SIGKILL to process %d", self.duty.name, self._child.pid)
            self._child.kill()
            await self.gone(REAPED_S)

    async def gone(self, within_s: float) -> bool:
        """Whether the process, already asked to go, is gone in time."""
        if self._child is None:
            return True
        try:
            await asyncio.wait_for(self._gone.wait(), within_s)
        except TimeoutError:
            return False
        return True

    def _listen(self) -> None:
        """Looks again when the silence could be too long."""
        if self._silence is not None:
            self._silence.cancel()
        allowed_s = self._beat_lost_s if self.hello else self._hello_s
        left_s = self._heard_at + allowed_s - time.monotonic()
        if left_s <= 0 and not self._doubted:
            self._doubted, left_s = True, min(DOUBT_S, allowed_s)
        if left_s > 0:
            self._silence = asyncio.get_running_loop().call_later(left_s, self._listen)
        elif not self._leaving:
            self.refuse(f"nothing was heard of process {self.pid} for {allowed_s:g} s; it is killed")

    def _exited(self, how: Exit) -> None:
        if self._silence is not None:
            self._silence.cancel()
        lost, self._child = self.identity.decode(), None
        self._gone.set()
        self._up.clear()
        self._on_lost(lost)
        if self._renewed and not self._leaving:
            log.info("%s: ended to be started again: %s", self.duty.name, how)
            self._retry = asyncio.get_running_loop().call_later(SOON_S, self.start)
        elif not self._leaving:
            log.error("%s: ended unasked: %s", self.duty.name, how)
            self._plan_restart()
        self._changed()

    def _plan_restart(self) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        if self.duty.indispensable and len(self._deaths) >= DEATHS_ALLOWED:
            last = "\n".join(self._book.tail(10))
            self._give_up(
                f"the {self.duty.name} died {len(self._deaths)} times within {WINDOW_S:.0f} s; its last words:\n{last}"
            )
            return
        self._retry = asyncio.get_running_loop().call_later(pause_after(len(self._deaths)), self.start)

    def _changed(self) -> None:
        self._since = time.time()
        self._on_change(self.status())
