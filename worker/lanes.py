"""A lane is one mlx_lm BatchGenerator and the sequences in it.

This is the only file that touches the generator's private attributes, as found in mlx-lm 0.32.2: `_prompt_batch` and
`_generation_batch` with their `uids`, `tokens` and `prompt_cache`. Blocks must be copied out of the live batch right after a
step; the public `extract_cache` copies the whole sequence every time, quadratic over a prefill.
Knows token ids and caches; must not know requests, text or blocks.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from mlx_lm.generate import BatchGenerator  # pyright: ignore[reportMissingTypeStubs]

from worker.faults import LoadFailed
from worker.mlx_types import Cache, LanguageModel, Processor, Sampler

UNLIMITED_TOKENS = 1 << 40
"""Ends are decided by the sequence, never by the generator: it would copy the cache of each sequence it ends."""


class _Batch(Protocol):
    uids: list[int]
    tokens: list[list[int]]
    prompt_cache: Cache


class _Response(Protocol):
    uid: int
    token: int


class _Generator(Protocol):
    prefill_step_size: int
    _prompt_batch: _Batch
    _generation_batch: _Batch

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int],
        caches: list[Cache] | None,
        all_tokens: list[list[int]],
        samplers: list[Sampler],
        logits_processors: list[list[Processor]],
    ) -> list[int]: ...

    def next(self) -> tuple[list[object], list[_Response]]: ...

    def remove(self, uids: list[int]) -> object: ...

    def close(self) -> None: ...

    @property
    def prompt_cache_nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache holds of one sequence after a step: valid only until the next one."""

    uid: int
    tokens: int
    leaves: Cache
    row: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """How many prompt tokens one step may take. `idle` is a multiple of `busy`, `busy` of the block size."""

    idle_tokens: int
    busy_tokens: int
    """While something decodes: every running stream waits for the chunk."""
    block_tokens: int


class Lane:
    def __init__(self, model: LanguageModel, max_rows: int, chunks: Chunks) -> None:
        self.max_rows = max_rows
        self.chunks = chunks
        self._rows = 0
        # One row more than is ever used: a generator whose decode batch is full does not prefill at all.
        self._generator = cast(
            "_Generator",
            BatchGenerator(
                model,  # pyright: ignore[reportArgumentType]  # structural type here, nn.Module there
                completion_batch_size=max_rows + 1,
                prefill_batch_size=1,
                prefill_step_size=chunks.idle_tokens,
            ),
        )
        self._check_internals()

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def has_room(self) -> bool:
        return self._rows < self.max_rows

    @property
    def is_prefilling(self) -> bool:
        """Some sequence has not reached the decode batch yet."""
        return self._rows > len(self._decoding.uids)

    @property
    def cache_bytes(self) -> int:
        return self._generator.prompt_cache_nbytes if self._rows else 0

    def insert(
        self,
        prompt: Sequence[int],
        cached_tokens: int,
        cache: Cache,
        sampler: Sampler,
        processors: list[Processor],
        edge: int = 0,
    ) -> int:
        """The uid of a new sequence, of whose prompt `cache` already holds the first `cached_tokens`.

        Some step will end exactly after `edge` tokens, so that the state there can be copied.
        """
        segments = segments_of(prompt, cached_tokens, self.chunks, edge)
        prefix = list(prompt[:cached_tokens])  # penalties and grammars see only what they are told of
        (uid,) = self._generator.insert_segments([segments], [UNLIMITED_TOKENS], [cache], [prefix], [sampler], [processors])
        self._rows += 1
        return uid

    def step(self) -> list[tuple[int, int]]:
        """One decode step for all, then one chunk of a prompt. Returns (uid, token) of each decoding sequence."""
        decoding = bool(self._decoding.uids)
        self._generator.prefill_step_size = self.chunks.busy_tokens if decoding else self.chunks.idle_tokens
        _, responses = self._generator.next()
        return [(response.uid, response.token) for response in responses]

    def held(self) -> Iterator[Held]:
        for batch in (self._prompting, self._decoding):
            for row, (uid, tokens) in enumerate(zip(batch.uids, batch.tokens, strict=True)):
                yield Held(uid, len(tokens), batch.prompt_cache, row)

    def remove(self, uids: Sequence[int]) -> None:
        self._generator.remove(list(uids))
        self._rows -= len(uids)

    def close(self) -> None:
        self._generator.close()

    @property
    def _prompting(self) -> _Batch:
        return self._generator._prompt_batch  # pyright: ignore[reportPrivateUsage]  # see the module's docstring

    @property
    def _decoding(self) -> _Batch:
        return self._generator._generation_batch  # pyright: ignore[reportPrivateUsage]  # see the module's docstring

    def _check_internals(self) -> None:
        batches = [getattr(self._generator, name, None) for name in ("_prompt_batch", "_generation_batch")]
        for batch in batches:
            for attribute in ("uids", "tokens", "prompt_cache"):
                if not isinstance(getattr(batch, attribute, None), list):
                    raise LoadFailed(f"this mlx-lm's BatchGenerator has no {attribute}: use the version omlxd was tested with")


def segments_of(prompt: Sequence[int], start: int, chunks: Chunks, extra_edge: int = 0) -> list[list[int]]:
    """The prompt from `start` on, cut where every run of it is cut: a restored run repeats the cold one's chunks bit for bit.

    Edges are the multiples of the idle chunk, the last block boundary that can be restored, and the last token, which is what
    the first answer token is computed from.
    """
    last = len(prompt) - 1
    whole = last // chunks.block_tokens * chunks.block_tokens
    edges = {*range(start // chunks.idle_tokens * chunks.idle_tokens, last, chunks.idle_tokens), whole, last, len(prompt)}
    cuts = [start, *sorted(edge for edge in {*edges, extra_edge} if start < edge <= len(prompt))]
    return [list(prompt[a:b]) for a, b in itertools.pairwise(cuts)]
