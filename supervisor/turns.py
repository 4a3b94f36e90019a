"""Whose turn it is to prefill: one device serves all workers, and two long prompts on it at once starve all that decodes.

A turn is held until another worker asks for it: then its holder is told, gives it back after the chunk at hand, and the next
one in line gets it. So whoever is alone keeps it and nothing is said. A holder that is dead, hung or stopped loses it. Decode
steps need no turn. Pure: `now` is handed in, what is to be told comes out; must not know sockets or models.
"""

import itertools
from dataclasses import dataclass

from supervisor.protocol import TurnState

LEVEL_TURNS = 4
"""One level of priority is worth so many places in line."""
MAX_LEVEL = 8
"""More than that would let a worker wait for hundreds of turns of others."""


@dataclass(frozen=True, slots=True)
class Tell:
    worker: bytes
    turn: int
    state: TurnState


@dataclass(slots=True)
class Held:
    worker: bytes
    turn: int
    wanted_at: float | None = None
    """Since when its holder knows that others wait."""


class Turns:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long a holder may keep the others waiting; longer than any chunk should take."""
        self._patience_s = patience_s
        self._workers: set[bytes] = set()
        self._held: Held | None = None
        self._line: dict[bytes, int] = {}
        """Who asked, and its place: the lowest is next."""
        self._numbers = itertools.count(1)
        self._tells: list[Tell] = []

    @property
    def holder(self) -> bytes | None:
        return None if self._held is None else self._held.worker

    @property
    def waiting(self) -> frozenset[bytes]:
        return frozenset(self._line)

    def next_deadline(self) -> float | None:
        """When the present holder will have kept the others waiting for too long."""
        held = self._held
        return None if held is None or held.wanted_at is None else held.wanted_at + self._patience_s

    # What happens; each returns what is to be told, in order

    def join(self, worker: bytes, now: float) -> list[Tell]:
        self._workers.add(worker)
        return self._advance(now)

    def leave(self, worker: bytes, now: float) -> list[Tell]:
        """It is dead, or will not prefill again."""
        self._workers.discard(worker)
        self._line.pop(worker, None)
        if self.holder == worker:
            self._held = None
        return self._advance(now)

    def ask(self, worker: bytes, priority: int, now: float) -> list[Tell]:
        if self._held is not None and self._held.worker == worker:
            self._say("yours")  # it has not heard of it, or it is slow to hear
            if self._held.wanted_at is not None:
                self._say("wanted")
        elif worker in self._workers:
            # Asking again, for something more urgent, never costs a place.
            place = next(self._numbers) - LEVEL_TURNS * max(-MAX_LEVEL, min(priority, MAX_LEVEL))
            self._line[worker] = min(place, self._line.get(worker, place))
        return self._advance(now)

    def give(self, worker: bytes, turn: int, now: float) -> list[Tell]:
        """An older turn than the present one was lost before."""
        if self._held is not None and (self._held.worker, self._held.turn) == (worker, turn):
            self._held = None
        return self._advance(now)

    def tick(self, now: float) -> list[Tell]:
        deadline = self.next_deadline()
        if deadline is not None and deadline <= now:
            self._say("lost")
            self._held = None
        return self._advance(now)

    def _advance(self, now: float) -> list[Tell]:
        if self._held is None:
            self._pass_on()
        held = self._held
        if held is not None and not self._line:
            held.wanted_at = None
        elif held is not None and held.wanted_at is None:
            held.wanted_at = now
            self._say("wanted")
        tells, self._tells = self._tells, []
        return tells

    def _pass_on(self) -> None:
        """To the next in line; to the only worker there is without being asked, so that it never has to ask."""
        if self._line:
            worker = min(self._line, key=self._line.__getitem__)
            del self._line[worker]
        elif len(self._workers) == 1:
            (worker,) = self._workers
        else:
            return
        self._held = Held(worker, next(self._numbers))
        self._say("yours")

    def _say(self, state: TurnState) -> None:
        assert self._held is not None
        self._tells.append(Tell(self._held.worker, self._held.turn, state))
