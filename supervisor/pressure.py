"""How short of memory this machine is, and how much of the budget still stands: readings in, one verdict out.

Two ceilings count: the machine's memory, which other programs fill too, and the user's limit for our own process tree. What a
verdict means for models is slot_memory.py's business. Pure: reads no meter and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from supervisor.budget import MIB, Tier, gib

SOFT_SHARES = {Tier.SAFE: 0.85, Tier.BALANCED: 0.90, Tier.AGGRESSIVE: 0.925, Tier.CUSTOM: 0.925}
ACTIVE_SHARES = {Tier.SAFE: 0.0, Tier.BALANCED: 0.25, Tier.AGGRESSIVE: 0.5, Tier.CUSTOM: 0.5}
"""macOS: how much of its active pages the system is trusted to give up; Linux says itself what is available."""

CALM_SHARE = 0.02
"""A level ends so far below the share at which it begins, or every trim would end the pressure that caused it."""
CALM_S = 5.0
SWAP_WINDOW_S = 10.0
SWAP_SOFT_BYTES = 64 * MIB
SWAP_HARD_BYTES = 512 * MIB


class Level(IntEnum):
    NONE = 0
    SOFT = 1
    """Pools and hot caches are trimmed."""
    HARD = 2
    """Nothing more is lent or loaded, and idle models go."""
    CRITICAL = 3
    """The largest model goes that is not pinned, busy or not."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of memory in use at which each level begins."""

    soft: float
    hard: float
    critical: float

    def level(self, share: float) -> Level:
        for level, begins in ((Level.CRITICAL, self.critical), (Level.HARD, self.hard), (Level.SOFT, self.soft)):
            if share >= begins:
                return level
        return Level.NONE


def thresholds(tier: Tier, soft: float | None = None, hard: float | None = None, critical: float | None = None) -> Thresholds:
    """What is not given follows: hard half way from soft to full, critical half way from hard."""
    soft = SOFT_SHARES[tier] if soft is None else soft
    hard = (1 + soft) / 2 if hard is None else max(soft, hard)
    return Thresholds(soft, hard, (1 + hard) / 2 if critical is None else max(hard, critical))


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the machine's memory."""

    total_bytes: int
    available_bytes: int  # what processes could get without anything being swapped out
    tree_bytes: int  # what our process tree takes
    own_bytes: int  # of that: the processes that are no workers
    private_bytes: int  # of the tree: what would be available if the tree were gone
    swapped_out_bytes: int = 0  # since the machine started
    swap_used_bytes: int = 0
    kernel: Level = Level.NONE  # what the system itself says


@dataclass(frozen=True, slots=True)
class Limits:
    """What was decided at the start."""

    budget_bytes: int
    tree_bytes: int | None = None  # the user's, for the whole process tree


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    because: str  # why the level is not none
    budget_bytes: int
    budget_because: str  # why it is below what was decided at the start
    over_bytes: int  # how much should go for the pressure to end
    outside_bytes: int  # held by others than our tree, or by nobody that can be seen


class Gauge:
    """Rises at once, falls when things have been better for a while."""

    def __init__(self, limits: Limits, marks: Thresholds) -> None:
        self.marks = marks
        self.limits = limits
        self._level = Level.NONE
        self._because = ""
        self._better_since: float | None = None
        self._was_critical = False
        self._swap: deque[tuple[float, int, int]] = deque()

    def read(self, reading: Reading, now: float) -> Verdict:
        self._swap.append((now, reading.swapped_out_bytes, reading.swap_used_bytes))
        while now - self._swap[0][0] > SWAP_WINDOW_S:
            self._swap.popleft()
        self._settle(*self._judge(reading, self.marks), self._judge(reading, self._lowered())[0], now)
        budget_bytes, why = self._budget(reading)
        return Verdict(
            self._level,
            self._because,
            budget_bytes,
            why,
            self._over_bytes(reading) if self._level else 0,
            max(0, reading.total_bytes - reading.available_bytes - reading.private_bytes),
        )

    def _settle(self, level: Level, because: str, lasting: Level, now: float) -> None:
        """`lasting` is the level by the marks at which one ends."""
        if level is Level.CRITICAL and not self._was_critical:
            self._was_critical = True  # one reading is not enough to end a running request for
            level = max(Level.HARD, self._level)
        else:
            self._was_critical = level is Level.CRITICAL
        if level >= self._level:
            self._level, self._because, self._better_since = level, because, None
        elif lasting >= self._level:
            self._better_since = None
        elif self._better_since is None:
            self._better_since = now
        elif now - self._better_since >= CALM_S:
            self._level, self._better_since = max(level, lasting), None
            self._because = because if self._level else ""

    def _lowered(self) -> Thresholds:
        marks = self.marks
        return Thresholds(marks.soft - CALM_SHARE, marks.hard - CALM_SHARE, marks.critical - CALM_SHARE)

    def _judge(self, reading: Reading, marks: Thresholds) -> tuple[Level, str]:
        used_bytes = reading.total_bytes - reading.available_bytes
        verdicts = [
            (
                marks.level(used_bytes / max(1, reading.total_bytes)),
                f"{gib(used_bytes)} of this machine's {gib(reading.total_bytes)} are in use",
            ),
            (self._swap_level(), f"{gib(self._swap_growth_bytes())} were swapped out within {SWAP_WINDOW_S:g} s"),
            (reading.kernel, "the system says that memory is short"),
        ]
        if self.limits.tree_bytes:
            share = reading.tree_bytes / self.limits.tree_bytes
            text = f"the server's processes take {gib(reading.tree_bytes)} of the {gib(self.limits.tree_bytes)} allowed"
            verdicts.append((marks.level(share), text))
        level, because = max(verdicts, key=lambda verdict: verdict[0])
        return level, because if level else ""

    def _swap_growth_bytes(self) -> int:
        (_, out, used), (_, out_now, used_now) = self._swap[0], self._swap[-1]
        return max(0, out_now - out, used_now - used)

    def _swap_level(self) -> Level:
        growth_bytes = self._swap_growth_bytes()
        if growth_bytes >= SWAP_HARD_BYTES:
            return Level.HARD
        return Level.SOFT if growth_bytes >= SWAP_SOFT_BYTES else Level.NONE

    def _over_bytes(self, reading: Reading) -> int:
        """Down to where the pressure ends; when only the swap or the system says that there is some, a little."""
        share = self.marks.soft - CALM_SHARE
        over_bytes = reading.total_bytes - reading.available_bytes - int(share * reading.total_bytes)
        if self.limits.tree_bytes:
            over_bytes = max(over_bytes, reading.tree_bytes - int(share * self.limits.tree_bytes))
        return over_bytes if over_bytes > 0 else max(SWAP_SOFT_BYTES, self._swap_growth_bytes())

    def _budget(self, reading: Reading) -> tuple[int, str]:
        """The least of what was decided, what can be had beside other programs, and what the tree's limit leaves to workers."""
        budget_bytes, why = self.limits.budget_bytes, ""
        ceiling_bytes = reading.available_bytes + reading.private_bytes
        if ceiling_bytes < budget_bytes:
            others = reading.total_bytes - ceiling_bytes
            budget_bytes, why = max(0, ceiling_bytes), f"other programs hold {gib(others)} of {gib(reading.total_bytes)}"
        if self.limits.tree_bytes and self.limits.tree_bytes - reading.own_bytes < budget_bytes:
            budget_bytes = max(0, self.limits.tree_bytes - reading.own_bytes)
            why = f"the server's own processes take {gib(reading.own_bytes)} of the {gib(self.limits.tree_bytes)} allowed"
        return budget_bytes, why
