"""How likely the model itself found the tokens of an answer, and what else it found likely.

The model's own distribution: a log-softmax of its logits before penalties, bias, grammar and temperature, as vLLM reports it.
Runs on the engine thread. Knows ids and numbers; what a token reads as is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.uint32]
LOWEST = -9999.0
"""Instead of minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Of each of some positions: the logarithms of all probabilities, and the most likely tokens in no order."""

    logprobs: mx.array
    """float32 `[positions, vocabulary]`"""
    top_ids: mx.array | None
    """`[positions, count]`, or None where nobody asked."""

    @classmethod
    def of(cls, logits: mx.array, count: int) -> "Ranked":
        """Nothing is computed yet."""
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return cls(logprobs, _most_likely(logprobs, min(count, logits.shape[-1])))

    @property
    def arrays(self) -> list[mx.array]:
        return [self.logprobs] if self.top_ids is None else [self.logprobs, self.top_ids]


def _most_likely(logprobs: mx.array, count: int) -> mx.array | None:
    if count == 0:
        return None
    if count == 1:  # what lm-eval asks for, at every token of a prompt
        return mx.argmax(logprobs, axis=-1, keepdims=True)
    return mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]


def entries(ranked: Ranked, tokens: Sequence[int]) -> list[dict[str, object]]:
    """One per position, for the token that came there."""
    logprobs = cast("Floats", np.array(ranked.logprobs, copy=False))
    no_ids = np.empty((len(tokens), 0), np.uint32)
    top_ids = no_ids if ranked.top_ids is None else cast("Ids", np.array(ranked.top_ids, copy=False))
    made: list[dict[str, object]] = []
    for row, top, token in zip(logprobs, top_ids, tokens, strict=True):
        ordered = sorted(((int(i), _finite(row[i])) for i in top), key=lambda found: (-found[1], found[0]))
        made.append(entry(token, _finite(row[token]), ordered))
    return made


def entry(token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> dict[str, object]:
    return {"id": token, "logprob": logprob, "top": [{"id": i, "logprob": value} for i, value in top]}


def _finite(value: np.float32) -> float:
    return max(float(value), LOWEST)


class Recorder:
    """A logits processor that changes nothing: the first in line, it keeps what the model said until the token is known."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, Ranked] = {}
        """By the index of the token to come. Two at most: a step is computed while the one before is reported."""

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        ranked = Ranked.of(logits, self._count)
        self._kept[context.size] = ranked
        # Now, so that it is ready when the token is: asked for later it would wait behind the whole next step.
        mx.async_eval(ranked.arrays)  # pyright: ignore[reportUnknownMemberType]
        return logits

    def take(self, position: int, token: int) -> list[dict[str, object]]:
        """The entry of the token at that index; what lies before it is forgotten."""
        ranked = self._kept.pop(position)
        for passed in [index for index in self._kept if index < position]:
            del self._kept[passed]
        return entries(ranked, [token])
