"""Which running answers are put aside for a while, so that there is memory or room, and how long what they left stays empty.

Whoever is put aside ("parked") leaves its lane and waits in line again at its old place; its KV is in the prefix cache, and
what is not there is computed again when it goes on. Choices over sequences and bytes; what parking does to a sequence is the
scheduler's business. Lives on the engine thread, between two rounds.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from worker.admission import Admission
from worker.appetite import Appetite
from worker.arrivals import Arrivals, claim
from worker.lane_set import LaneSet
from worker.line import rank_after_run
from worker.sequence import Sequence

_log = logging.getLogger(__name__)
MAX_PARKS = 3
"""Nobody is put aside more often, unless memory is critical: each time costs it the line and part of a block."""
HOLD_S = 15.0
"""So long after a demand for memory its room is not filled again: while memory is short the supervisor asks every 10 s."""
LOOK_EVERY_ROUNDS = 16
"""A row grows by one token a round, a lane by 256 at a time."""


class Parking:
    def __init__(
        self,
        lanes: LaneSet,
        arrivals: Arrivals,
        admission: Admission,
        appetite: Appetite,
        park: Callable[[Many[Sequence]], None],
    ) -> None:
        self.parks = 0
        self._lanes = lanes
        self._arrivals = arrivals
        self._admission = admission
        self._appetite = appetite
        self._park = park
        self._hold_until: float | None = None
        self._rounds = 0

    def advance(self, now: float) -> None:
        """Once per round, after arrivals had their turn."""
        if self._hold_until is not None and now >= self._hold_until:
            self.lift()
        self._rounds += 1
        if self._rounds % LOOK_EVERY_ROUNDS == 0:
            self.fit_grant(now)
        self._make_way(now)

    def lift(self) -> None:
        """The pressure is over."""
        self._hold_until = None
        self._admission.pressed_bytes = None
        self._admission.is_shut = False

    def press(self, wanted_bytes: int, now: float, *, is_critical: bool) -> None:
        """The system is short of memory: parks until the lanes hold so much less, all of them when it is critical.

        The last running answer goes on unless it is.
        """
        put_back = self._arrivals.put_back(scored_too=is_critical)
        before_bytes = self._lanes.cache_bytes
        left_bytes = 0 if is_critical else before_bytes - wanted_bytes
        parked = 0
        while self._lanes.cache_bytes > left_bytes and (victim := self._victim(is_critical=is_critical)) is not None:
            self._put_aside([victim], "memory is critical" if is_critical else "memory is short")
            parked += 1
        if self._lanes.rows or parked or (put_back and is_critical):
            self._hold_until = now + HOLD_S
            self._admission.pressed_bytes = self.needed_bytes(self._lanes.sequences())
            self._admission.is_shut = not self._lanes.rows
        _log.info(
            "%d MiB of KV were asked back, %d are free", wanted_bytes >> 20, (before_bytes - self._lanes.cache_bytes) >> 20
        )

    def fit_grant(self, now: float) -> None:
        """The lanes have grown beyond the grant, or it has shrunk: asks for more, then parks all but the last."""
        while (over_bytes := self._over_bytes()) > 0:
            if self._admission.pressed_bytes is None:
                self._appetite.ask(over_bytes, now)
            if self._appetite.awaits_answer(now) or (victim := self._victim(is_critical=False)) is None:
                return
            self._put_aside([victim], "the KV granted is used up")

    def needed_bytes(self, sequences: Iterable[Sequence]) -> int:
        return self._admission.needed_bytes(claim(sequence) for sequence in sequences)

    # ------------------------------------------------------------------ who goes

    def _victim(self, *, is_critical: bool) -> Sequence | None:
        """The least urgent, of those the newest."""
        running = self._lanes.sequences()
        if len(running) < 2 and not is_critical:
            return None
        may_go = [sequence for sequence in running if is_critical or sequence.parks < MAX_PARKS]
        return max(may_go, key=_last_served, default=None)

    def _make_way(self, now: float) -> None:
        """For whoever is next in line: rows of batch priority, if it is more urgent and would go before them in line, too."""
        running = self._lanes.sequences()
        if not any(sequence.job.priority < 0 for sequence in running) or (blocked := self._arrivals.blocked) is None:
            return
        may_go = [
            sequence
            for sequence in sorted(running, key=_last_served, reverse=True)
            if sequence.job.priority < 0
            and sequence.job.priority < blocked.job.priority
            and rank_after_run(sequence, now) > blocked.rank
            and sequence.parks < MAX_PARKS
        ]
        if not may_go:
            return
        parting: list[Sequence] = []
        while not self._would_fit(blocked, [sequence for sequence in running if sequence not in parting]):
            if not may_go:
                return
            parting.append(may_go.pop(0))
        if parting and not (self._lanes.has_room and self._appetite.awaits_answer(now)):
            for sequence in parting:  # or it would be its turn again at once
                sequence.rank = rank_after_run(sequence, now)
            self._put_aside(parting, f"{blocked.job.rid} is more urgent")

    def _would_fit(self, newcomer: Sequence, others: Many[Sequence]) -> bool:
        if len(others) >= self._lanes.max_rows or self._admission.is_shut:
            return False
        return not others or self._admission.fits([claim(sequence) for sequence in (*others, newcomer)])

    def _over_bytes(self) -> int:
        """What is needed now, if it is more than may be used; else 0."""
        running = self._lanes.sequences()
        limit_bytes = self._admission.limit_bytes
        if limit_bytes is None:
            return 0
        taken_bytes = max(self._admission.taken_bytes([len(sequence.tokens) for sequence in running]), self._lanes.cache_bytes)
        return max(taken_bytes, self.needed_bytes(running)) if taken_bytes > limit_bytes else 0

    def _put_aside(self, sequences: Many[Sequence], reason: str) -> None:
        for sequence in sequences:
            name, tokens = f"{sequence.job.rid}/{sequence.choice}", len(sequence.tokens)
            _log.info("%s is parked at token %d, %d times so far: %s", name, tokens, sequence.parks, reason)
        self.parks += len(sequences)
        self._park(sequences)


def _last_served(sequence: Sequence) -> tuple[int, tuple[float, int]]:
    return -sequence.job.priority, sequence.rank
