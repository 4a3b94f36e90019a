"""What the store did, in numbers a worker reports with every beat. Knows no files."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Miss(StrEnum):
    ABSENT = "absent"
    BAD = "bad"
    KNOWN_BAD = "known_bad"
    UNREADABLE = "unreadable"
    UNAVAILABLE = "unavailable"


class Drop(StrEnum):
    """Why a block was not written."""

    QUEUE_FULL = "queue_full"
    CLOSED = "closed"
    READ_ONLY = "read_only"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the start of this process. `bad` counts blocks set aside, by what was wrong with them."""

    hits: int
    misses: Mapping[Miss, int]
    bytes_read: int
    blocks_written: int
    bytes_written: int
    dropped: Mapping[Drop, int]
    bad: Mapping[str, int]


class Tally:
    """The growing side of Counters. Its owner holds a lock around every call."""

    def __init__(self) -> None:
        self.hits = self.bytes_read = self.blocks_written = self.bytes_written = 0
        self.misses: Counter[Miss] = Counter()
        self.dropped: Counter[Drop] = Counter()
        self.bad: Counter[str] = Counter()

    def counters(self) -> Counters:
        return Counters(
            hits=self.hits,
            misses=dict(self.misses),
            bytes_read=self.bytes_read,
            blocks_written=self.blocks_written,
            bytes_written=self.bytes_written,
            dropped=dict(self.dropped),
            bad=dict(self.bad),
        )
