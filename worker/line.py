"""Those who wait: larger priority first, equal ones in order of arrival; whoever waits long enough overtakes any priority.

Pure; must not know lanes.
"""

import itertools
from collections.abc import Iterator

from worker.sequence import Sequence

AGING_S = 30.0
"""So much waiting is worth one level of priority."""


class Line:
    def __init__(self) -> None:
        self._entries: dict[Sequence, tuple[float, int]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are served; safe against changes meanwhile."""
        return iter(sorted(self._entries, key=self._entries.__getitem__))

    def join(self, sequence: Sequence, now: float) -> None:
        # All age at the same rate, so who goes before whom never changes.
        self._entries[sequence] = (now / AGING_S - sequence.job.priority, next(self._arrivals))

    def take(self, sequence: Sequence) -> None:
        del self._entries[sequence]

    def leave(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out."""
        gone = [sequence for sequence in self._entries if sequence.job.rid in rids]
        for sequence in gone:
            del self._entries[sequence]
        return gone
