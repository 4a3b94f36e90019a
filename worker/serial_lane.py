"""A lane for one sequence at a time, step by step as in others: where mlx_lm cannot batch the caches, or a draft model helps.

Stands in for `worker.lanes.Lane`, with the same promises: a step is one decode step or one chunk of the prompt, and a token is
reported when the cache holds it. With a draft model a decode step may yield several tokens. Knows token ids and caches; must
not know requests, text or blocks.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream  # pyright: ignore[reportMissingTypeStubs]

from worker.drafting import Counts, Draft, DraftModel, rewind
from worker.kv_leaves import bytes_of
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
    draft: Draft | None
    next_token: mx.array | None = None
    """[1], being computed."""


class SerialLane:
    max_rows = 1

    def __init__(
        self, model: LanguageModel, chunks: Chunks, quantizing: KvQuantizing | None = None, draft: DraftModel | None = None
    ) -> None:
        self.chunks = chunks
        self._draft = draft
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
        if self._only is None:
            return 0
        drafts = [] if self._only.draft is None else self._only.draft.cache
        return bytes_of([*self._only.cache, *drafts])

    @property
    def draft_counts(self) -> dict[str, int]:
        """Of all sequences so far; empty where there is no draft model."""
        return {} if self._draft is None else dataclasses.asdict(self._draft.counts)

    @property
    def own_counts(self) -> Counts | None:
        """Of the present sequence."""
        return None if self._only is None or self._only.draft is None else self._only.draft.counts

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
        draft = None if self._draft is None else Draft(self._draft)
        self._only = _Only(self._uids, cache, sampler, processors, list(prompt[:cached_tokens]), segments, draft)
        return self._uids

    def decode(self) -> list[tuple[int, int]]:
        """As `Lane.decode`; so are the next two."""
        only = self._only
        if only is None or only.next_token is None:
            return []
        with mx.stream(_STREAM):
            return [(only.uid, token) for token in self._round(only, only.next_token)]

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

    def cut_back(self, uid: int, tokens: int) -> None:
        """As `Lane.cut_back`."""
        only = self._only
        if only is not None and only.uid == uid and len(only.tokens) > tokens:
            rewind(only.cache, len(only.tokens) - tokens)
            del only.tokens[tokens:]

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
        if only.draft is not None:
            only.draft.catch_up(only.tokens, len(chunk))
        if only.pending:
            # Not the logits: most of the chunk's would be computed for nothing.
            mx.eval([leaf.state for leaf in only.cache])  # pyright: ignore[reportUnknownMemberType]
            mx.clear_cache()
        else:
            self._sample(only, logits)
        return len(chunk)

    def _round(self, only: _Only, token: mx.array) -> list[int]:
        draft = only.draft
        if draft is None or (self._quantizing is not None and len(only.tokens) < self._quantizing.start):
            return [self._decode(only, token)]
        if draft.behind(len(only.tokens)) > self.chunks.busy_tokens:  # of a restored prompt it knows nothing yet
            draft.catch_up(only.tokens, self.chunks.busy_tokens)
            return [self._decode(only, token)]
        return self._speculate(only, draft, cast("int", token.item()))

    def _speculate(self, only: _Only, draft: Draft, token: int) -> list[int]:
        """`token`, and what was proposed after it as far as it is what the model says; `next_token` is what it says then."""
        proposed = draft.propose([*only.tokens, token])
        logits = self._model(mx.array([[token, *proposed]]), cache=only.cache)
        only.tokens.append(token)
        produced = [token]
        for place, guess in enumerate([*proposed, None]):
            # One after the other: samplers and processors must see what they see without a draft.
            chosen = self._sample(only, logits[:, place, :])
            if guess is None or chosen.item() != guess:
                break
            only.tokens.append(guess)
            produced.append(guess)
        accepted = len(produced) - 1
        rewind(only.cache, len(proposed) - accepted)
        draft.settle(len(only.tokens), len(proposed), accepted)
        return produced

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

    def _sample(self, only: _Only, logits: mx.array) -> mx.array:
        """Starts to compute the token that follows `only.tokens`."""
        for processor in only.processors:
            logits = processor(mx.array(only.tokens), logits)
        only.next_token = only.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.async_eval(only.next_token)  # pyright: ignore[reportUnknownMemberType]
        return only.next_token
