"""A lane for models whose caches mlx_lm cannot batch: one sequence at a time, step by step like any other lane.

Stands in for `worker.lanes.Lane`, with the same promises: a step is one decode step or one chunk of the prompt, and a token is
reported when the cache holds it. Knows token ids and caches; must not know requests, text or blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream  # pyright: ignore[reportMissingTypeStubs]

from worker.kv_quantizing import KvQuantizing
from worker.lanes import Chunks, Held, segments_of
from worker.mlx_types import Cache, LanguageModel, Processor, Sampler

_STREAM = cast("mx.Stream", generation_stream)
"""The one that batches use as well: two streams in one process have returned garbage."""


@dataclass(slots=True)
class _Only:
    """The one sequence."""

    uid: int
    cache: Cache
    sampler: Sampler
    processors: list[Processor]
    tokens: list[int]
    """What the cache holds."""
    pending: list[list[int]]
    """Segments of the prompt still to come."""
    next_token: mx.array | None = None
    """[1], being computed."""


class SerialLane:
    max_rows = 1

    def __init__(self, model: LanguageModel, chunks: Chunks, quantizing: KvQuantizing | None = None) -> None:
        self.chunks = chunks
        self._quantizing = quantizing
        self._model = model
        self._only: _Only | None = None
        self._uids = 0

    @property
    def rows(self) -> int:
        return 0 if self._only is None else 1

    @property
    def has_room(self) -> bool:
        return self._only is None

    @property
    def is_prefilling(self) -> bool:
        return self._only is not None and self._only.next_token is None

    @property
    def prefilling_uid(self) -> int:
        return 0 if self._only is None else self._only.uid

    @property
    def cache_bytes(self) -> int:
        return 0 if self._only is None else sum(leaf.nbytes for leaf in self._only.cache)

    def insert(
        self,
        prompt: Sequence[int],
        cached_tokens: int,
        cache: Cache,
        sampler: Sampler,
        processors: list[Processor],
        edge: int = 0,
    ) -> int:
        """As `Lane.insert`; only while there is room."""
        if self._only is not None:
            raise ValueError("a serial lane holds one sequence")
        self._uids += 1
        start = 0 if self._quantizing is None else self._quantizing.start
        segments = segments_of(prompt, cached_tokens, self.chunks, edge, start)
        self._only = _Only(self._uids, cache, sampler, processors, list(prompt[:cached_tokens]), segments)
        return self._uids

    def decode(self) -> list[tuple[int, int]]:
        """As `Lane.decode`; so are the next two."""
        only = self._only
        if only is None or only.next_token is None:
            return []
        with mx.stream(_STREAM):
            return [(only.uid, self._decode(only, only.next_token))]

    def next_chunk(self, chunk_tokens: int) -> int:
        return chunk_tokens - (0 if self._only is None else len(self._only.tokens)) % chunk_tokens

    def prefill(self, chunk_tokens: int) -> int:
        only = self._only
        if only is None or only.next_token is not None:
            return 0
        with mx.stream(_STREAM):
            return self._prefill(only, self.next_chunk(chunk_tokens))

    def step(self) -> list[tuple[int, int]]:
        produced = self.decode()
        if self.is_prefilling:
            self.prefill(self.chunks.idle_tokens)
        return produced

    def held(self) -> Iterator[Held]:
        if self._only is not None:
            yield Held(self._only.uid, len(self._only.tokens), self._only.cache, 0)

    def remove(self, uids: Sequence[int]) -> None:
        if self._only is not None and self._only.uid in uids:
            self._only = None

    def close(self) -> None:
        self._only = None

    def _prefill(self, only: _Only, most_tokens: int) -> int:
        """One chunk; the last one, a single token, yields the first token of the answer. Returns how many tokens it was."""
        segment = only.pending[0]
        chunk, rest = segment[:most_tokens], segment[most_tokens:]
        only.pending[0] = rest
        if not rest:
            only.pending.pop(0)
        logits = self._forward(only, mx.array([chunk]))
        only.tokens += chunk
        self._settle(only)
        if only.pending:
            # Not the logits: most of the chunk's would be computed for nothing.
            mx.eval([leaf.state for leaf in only.cache])  # pyright: ignore[reportUnknownMemberType]
            mx.clear_cache()
        else:
            self._sample(only, logits)
        return len(chunk)

    def _decode(self, only: _Only, token: mx.array) -> int:
        logits = self._forward(only, token[None])
        value = cast("int", token.item())
        only.tokens.append(value)
        self._settle(only)
        self._sample(only, logits)
        return value

    def _settle(self, only: _Only) -> None:
        if self._quantizing is not None:
            self._quantizing.settle(only.cache, len(only.tokens))

    def _forward(self, only: _Only, inputs: mx.array) -> mx.array:
        return self._model(inputs, cache=only.cache)[:, -1, :]

    def _sample(self, only: _Only, logits: mx.array) -> None:
        """Starts to compute the token that follows `only.tokens`."""
        for processor in only.processors:
            logits = processor(mx.array(only.tokens), logits)
        only.next_token = only.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.async_eval(only.next_token)  # pyright: ignore[reportUnknownMemberType]
