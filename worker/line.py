"""Those who wait: larger priority first, equal ones in order of arrival. Pure; must not know lanes."""

import heapq
import itertools
from collections.abc import Iterator

from worker.sequence import Sequence


class Line:
    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Sequence]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return (sequence for _, _, sequence in self._entries)

    def join(self, sequence: Sequence) -> None:
        heapq.heappush(self._entries, (-sequence.job.priority, next(self._arrivals), sequence))

    def next(self) -> Sequence:
        """Takes the first one out; IndexError when there is none."""
        return heapq.heappop(self._entries)[2]

    def leave(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out."""
        gone = [sequence for sequence in self if sequence.job.rid in rids]
        self._entries = [entry for entry in self._entries if entry[2].job.rid not in rids]
        heapq.heapify(self._entries)
        return gone
