"""Those who wait: larger priority first, equal ones in order of arrival; whoever waits long enough overtakes any priority.

Pure; must not know lanes.
"""

import itertools
from collections.abc import Iterator

from worker.sequence import Sequence

AGING_S = 30.0
"""So much waiting is worth one level of priority."""


def rank_after_run(sequence: Sequence, now: float) -> tuple[float, int]:
    """The place of one that has run since it was taken, if only waiting shall have made it older."""
    return sequence.rank[0] + (now - sequence.taken_at) / AGING_S, sequence.rank[1]


class Line:
    def __init__(self) -> None:
        self._waiting: set[Sequence] = set()
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are served; safe against changes meanwhile."""
        return iter(sorted(self._waiting, key=lambda sequence: sequence.rank))

    def join(self, sequence: Sequence, now: float) -> None:
        # All age at the same rate, so who goes before whom never changes.
        sequence.rank = (now / AGING_S - sequence.job.priority, next(self._arrivals))
        self._waiting.add(sequence)

    def rejoin(self, sequence: Sequence) -> None:
        """It was taken before, and has its old place: before all that came later and are no more urgent."""
        self._waiting.add(sequence)

    def take(self, sequence: Sequence, now: float) -> None:
        sequence.taken_at = now
        self._waiting.remove(sequence)

    def leave(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out."""
        gone = [sequence for sequence in self if sequence.job.rid in rids]
        self._waiting.difference_update(gone)
        return gone
