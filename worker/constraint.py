"""A logits processor that lets through only what a request's grammar allows next; one per sequence, with a state of its own.

Runs on the engine thread. Must not raise: an exception in one row's processor would end the whole batch. Whatever goes wrong is
kept in `trouble`, and the row is led to its end.
"""

from typing import cast

import mlx.core as mx
import numpy as np

from worker.job import Matcher


class Constraint:
    def __init__(self, matcher: Matcher, prompt_tokens: int, eos_ids: frozenset[int]) -> None:
        self.trouble: str | None = None
        self._matcher = matcher.deep_copy()
        self._eos_ids = sorted(eos_ids)
        self._read_tokens = prompt_tokens

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        # The mask is made while the device computes the logits; the last token of the context is known by now.
        mx.async_eval(logits)  # pyright: ignore[reportUnknownMemberType]
        if context.size > self._read_tokens:
            self._read(cast("list[int]", context[self._read_tokens :].tolist()))
        if self.trouble is not None or self._matcher.is_stopped():
            return self._only_ends(logits)
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self._matcher.is_error():
            self.trouble = self._matcher.get_error()
            return self._only_ends(logits)
        size = logits.shape[-1]
        if len(allowed) < size:  # models pad their vocabulary
            allowed = np.pad(allowed, (0, size - len(allowed)))
        return mx.where(mx.array(allowed[:size]) > 0, logits, -mx.inf)

    def _read(self, tokens: list[int]) -> None:
        for token in tokens:
            self._read_tokens += 1
            if self.trouble is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token):
                self.trouble = self._matcher.get_error() or "the grammar cannot go on"

    def _only_ends(self, logits: mx.array) -> mx.array:
        """Not a mask over the logits: min_tokens may have barred the end already, and something has to be left."""
        ends = np.full(logits.shape[-1], -np.inf, np.float32)
        ends[self._eos_ids] = 0.0
        return mx.array(ends)[None].astype(logits.dtype)
