"""A prompt's way through the model with every token scored: what `echo` with `logprobs` needs, lm-eval above all.

Stands in for a restore: computes the cache up to the last token, a chunk at a time between two steps, so that the streams that
run wait for one chunk at most. Past the prefix cache, which keeps no logits. Runs on the engine thread.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream  # pyright: ignore[reportMissingTypeStubs]

from worker.kv_quantizing import KvQuantizing
from worker.logprobs import Ranked, entries, entry
from worker.mlx_types import Cache, LanguageModel, evaluate

_STREAM = cast("mx.Stream", generation_stream)
LOGITS_BYTES = 64 << 20
"""Of one chunk, in float32: at 152k tokens of vocabulary, 110 positions. Ranking them takes twice as much again."""


@dataclass(frozen=True, slots=True)
class Scored:
    """As `Restored`: `cache` holds the first `tokens` of the prompt. They count as computed, not as cached."""

    cache: Cache | None
    tokens: int
    hot_tokens: int = 0
    cold_tokens: int = 0


class Scoring:
    def __init__(
        self,
        model: LanguageModel,
        cache: Cache,
        prompt: Sequence[int],
        top: int,
        vocab_size: int,
        most_tokens: int,
        quantizing: KvQuantizing | None = None,
    ) -> None:
        self._quantizing = quantizing
        self.entries = [entry(prompt[0], None, ())]
        """One per token so far; there is nothing that the first could be judged by."""
        self._model = model
        self._cache = cache
        self._prompt = prompt
        self._top = top
        self._chunk_tokens = max(1, min(most_tokens, LOGITS_BYTES // (4 * vocab_size)))

    def advance(self, until: float) -> Scored | None:
        """At least one chunk; goes on until the clock passes `until`, and returns the outcome once it is complete."""
        last = len(self._prompt) - 1
        with mx.stream(_STREAM):
            while (done := len(self.entries) - 1) < last:
                end = min(done + self._chunk_tokens, last)
                self._score(done, end if self._quantizing is None else self._quantizing.stop(done, end))
                if time.monotonic() >= until:
                    break
        if len(self.entries) <= last:
            return None
        return Scored(self._cache if last else None, last)

    def _score(self, start: int, end: int) -> None:
        logits = self._model(mx.array([self._prompt[start:end]]), cache=self._cache)
        ranked = Ranked.of(logits[0], self._top)
        evaluate([*ranked.arrays, *(cast("mx.array", leaf.state) for leaf in self._cache)])
        if self._quantizing is not None:
            self._quantizing.settle(self._cache, end)
        self.entries += entries(ranked, self._prompt[start + 1 : end + 1])
        mx.clear_cache()
