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

    def bytes(self, tokens: int) -> int:
        return sum(each * (tokens if window is None else min(tokens, window)) for each, window in self.layers)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one sequence may need."""

    prompt_tokens: int
    max_tokens: int
    held_tokens: int = 0

    @property
    def tokens(self) -> int:
        expected = self.prompt_tokens + min(self.max_tokens, ANSWER_TOKENS)
        return min(max(expected, self.held_tokens), self.prompt_tokens + self.max_tokens)


class Admission:
    def __init__(self, cost: KvCost, granted_bytes: int, ceiling_bytes: int) -> None:
        """0 stands for no limit."""
        self.granted_bytes = granted_bytes
        self._cost = cost
        self._ceiling_bytes = ceiling_bytes

    def needed_bytes(self, claims: Iterable[Claim]) -> int:
        return sum(KV_COPIES * self._cost.bytes(row_tokens(claim.tokens)) for claim in claims)

    def check(self, claim: Claim) -> None:
        """Raises KvTooLarge."""
        needed_bytes = self.needed_bytes([claim])
        if 0 < self._ceiling_bytes < needed_bytes:
            raise KvTooLarge(claim.tokens, needed_bytes, self._ceiling_bytes)

    def fits(self, claims: Iterable[Claim]) -> bool:
        return self.granted_bytes <= 0 or self.needed_bytes(claims) <= self.granted_bytes
