"""Whether there is memory for one more request, by arithmetic: MLX's own limits are soft and are noticed too late.

Bytes against what this worker was granted, and against what it could ever be granted. Pure; must not know lanes or MLX.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.lane_choice import row_tokens

KV_COPIES = 2
"""Joining, leaving and growing a batch copies the cache."""
ANSWER_TOKENS = 1024
"""Of an answer no more is set aside beforehand: whoever names no limit may fill the context, and hardly ever does."""


class KvTooLarge(Exception):
    """The request would not fit if it were the only one."""

    def __init__(self, tokens: int, needed_bytes: int, ceiling_bytes: int) -> None:
        super().__init__(
            f"This request's {tokens} tokens of prompt and answer need {needed_bytes >> 20} MiB of KV cache; "
            f"this model can have at most {ceiling_bytes >> 20} MiB."
        )


@dataclass(frozen=True, slots=True)
class KvCost:
    """What a sequence's cache takes."""

    layers: tuple[tuple[int, int | None], ...]
    """(bytes per token, window) of every layer that keeps rows."""
    early: "KvCost | None" = None
    """What they take up to `early_tokens`, where that is something else."""
    early_tokens: int = 0
    state_bytes: int = 0
    """Of layers that sum up all tokens so far, however many."""

    def bytes(self, tokens: int) -> int:
        own = sum(each * (tokens if window is None else min(tokens, window)) for each, window in self.layers)
        own += self.state_bytes
        return own if self.early is None else max(own, self.early.bytes(min(tokens, self.early_tokens)))

    @property
    def bytes_per_token(self) -> int:
        return sum(each for each, _ in self.layers)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one sequence may need."""

    begun_tokens: int
    """Its prompt, or all there was when it was put aside."""
    max_tokens: int
    """Beyond those."""
    held_tokens: int = 0

    @property
    def tokens(self) -> int:
        expected = self.begun_tokens + min(self.max_tokens, ANSWER_TOKENS)
        return min(max(expected, self.held_tokens), self.begun_tokens + self.max_tokens)


class Admission:
    def __init__(self, cost: KvCost, granted_bytes: int, ceiling_bytes: int) -> None:
        """0 stands for no limit."""
        self.granted_bytes = granted_bytes
        self.pressed_bytes: int | None = None
        """While memory is short no more than this is used, whatever was granted."""
        self.is_shut = False
        """Nobody may begin, not even alone."""
        self._cost = cost
        self._ceiling_bytes = ceiling_bytes

    @property
    def limit_bytes(self) -> int | None:
        """None: as much as there is."""
        limits = [limit for limit in (self.granted_bytes or None, self.pressed_bytes) if limit is not None]
        return min(limits, default=None)

    def needed_bytes(self, claims: Iterable[Claim]) -> int:
        return self.taken_bytes(claim.tokens for claim in claims)

    def taken_bytes(self, lengths: Iterable[int]) -> int:
        """By rows of those lengths, copies included."""
        # The newest copy of a state waits in RAM until it is clear whether it is kept (`worker.snapshots`).
        return sum(KV_COPIES * self._cost.bytes(row_tokens(length)) + self._cost.state_bytes for length in lengths)

    def check(self, claim: Claim) -> None:
        """Raises KvTooLarge."""
        needed_bytes = self.needed_bytes([claim])
        if 0 < self._ceiling_bytes < needed_bytes:
            raise KvTooLarge(claim.tokens, needed_bytes, self._ceiling_bytes)

    def fits(self, claims: Iterable[Claim]) -> bool:
        limit_bytes = self.limit_bytes
        return limit_bytes is None or self.needed_bytes(claims) <= limit_bytes
