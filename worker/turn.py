"""The engine's side of prefill turns: may it prefill now, has it asked, must it give back.

On the engine thread. Whoever holds the turn keeps it until somebody wants it, so a worker that is alone never asks. Turns come
from the supervisor (`supervisor/turns.py`); an engine that nobody leases turns to may always prefill.
"""

from collections.abc import Callable

from supervisor.protocol import AskTurn, GiveTurn, Turn

ASK_AGAIN_S = 5.0
"""A message can be lost with a socket that its reader could not keep up with."""


class PrefillTurn:
    def __init__(self, say: Callable[[AskTurn | GiveTurn], None], *, leased: bool) -> None:
        self.passed_on = 0
        """How often it was given to a neighbour that waited for it."""
        self._say = say
        self._leased = leased
        self._turn: int | None = None
        self._wanted = False
        self._asked_at: float | None = None
        self._asked_priority = 0

    @property
    def is_awaited(self) -> bool:
        return self._asked_at is not None

    def take(self, message: Turn) -> None:
        match message.state:
            case "yours":
                self._turn, self._wanted, self._asked_at = message.turn, False, None
            case "wanted":
                self._wanted = self._wanted or self._turn == message.turn
            case "lost":
                self._turn = None if self._turn == message.turn else self._turn

    def has(self, priority: int, now: float) -> bool:
        """Whether a chunk may be prefilled at once; if not, the turn has been asked for."""
        if self._turn is not None or not self._leased:
            return True
        if self._asked_at is None or priority > self._asked_priority or now - self._asked_at >= ASK_AGAIN_S:
            self._asked_at, self._asked_priority = now, priority
            self._say(AskTurn(priority=priority))
        return False

    def settle(self) -> None:
        """The chunk is done, or there is none to do: whoever waits for the turn gets it."""
        if self._turn is not None and self._wanted:
            self._say(GiveTurn(turn=self._turn))
            self._turn, self._wanted = None, False
            self.passed_on += 1
