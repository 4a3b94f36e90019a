"""What workers should know of each other: how many neighbours are at work, and how many of them decode.

A busy worker whose state is not known yet counts as one that decodes. Only busy workers are told anything, and only what
changed; as long as one is alone nothing is said. Pure; must not know sockets or models.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Neighbours:
    busy: int = 0
    decoding: int = 0
    computing: int = 1
    """Workers that use the device at once, itself included: all that decode, and of the others the one whose turn it is."""


class Company:
    def __init__(self) -> None:
        self._busy: frozenset[bytes] = frozenset()
        self._quiet: set[bytes] = set()
        """Those that said that nothing decodes there. Only who was told of a neighbour says so, and says when it changes."""
        self._told: dict[bytes, Neighbours] = {}

    def work(self, busy: Iterable[bytes]) -> dict[bytes, Neighbours]:
        """These have requests now, and no others. Returns who is to be told what."""
        now = frozenset(busy)
        if now == self._busy:
            return {}
        self._busy = now
        return self._news()

    def decodes(self, worker: bytes, decoding: bool) -> dict[bytes, Neighbours]:
        if not self._told.get(worker, Neighbours()).busy:
            return {}  # said before it heard that it is alone: when it is not any more it will say so again
        if decoding:
            self._quiet.discard(worker)
        else:
            self._quiet.add(worker)
        return self._news()

    def leave(self, worker: bytes) -> dict[bytes, Neighbours]:
        """It is dead."""
        self._told.pop(worker, None)
        self._quiet.discard(worker)
        return self.work(self._busy - {worker})

    def _news(self) -> dict[bytes, Neighbours]:
        decoding = self._busy - self._quiet
        computing = len(decoding) + bool(self._busy - decoding)
        around = {w: Neighbours(len(self._busy) - 1, len(decoding - {w}), computing) for w in self._busy}
        if len(around) == 1:
            around = dict.fromkeys(around, Neighbours())
        news = {w: neighbours for w, neighbours in around.items() if self._told.get(w, Neighbours()) != neighbours}
        self._told |= news
        self._quiet -= {w for w, neighbours in news.items() if not neighbours.busy}
        return news
