"""A lane is one mlx_lm BatchGenerator and the sequences in it: they decode as one batch, and one prompt at a time is prefilled.

This is the only file that touches the generator's private attributes, as found in mlx-lm 0.32.2: `_prompt_batch` and
`_generation_batch` with their `uids`, `tokens` and `prompt_cache`, `_unprocessed_sequences` and `_uid_count`. Blocks must be
copied out of the live batch right after each call; the public `extract_cache` copies the whole sequence every time, quadratic
over a prefill. Knows token ids and caches; must not know requests, text or blocks.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch  # pyright: ignore[reportMissingTypeStubs]

from worker.faults import LoadFailed
from worker.kv_leaves import bytes_of
from worker.lane_handover import OnePrompt, handed_over
from worker.mlx_types import Cache, LanguageModel, Processor, Sampler

UNLIMITED_TOKENS = 1 << 40
"""Ends are decided by the sequence, never by the generator: it would copy the cache of each sequence it ends."""
CLEAR_EVERY_STEPS = 512
"""As mlx_lm does: buffers that MLX keeps for reuse go back now and then."""


class _Batch(Protocol):
    uids: list[int]
    tokens: list[list[int]]
    prompt_cache: Cache


class _Response(Protocol):
    uid: int
    token: int


class _Decoding(_Batch, Protocol):
    def next(self) -> list[_Response]: ...

    def extend(self, batch: "_Decoding") -> None:
        """Appends the other's sequences, with the tokens that are being computed for them."""
        ...


class _Generator(Protocol):
    prefill_step_size: int
    _prompt_batch: _Batch
    _generation_batch: _Decoding
    _unprocessed_sequences: deque[tuple[int, object, object, Cache, list[int]]]
    """(uid, …, the given cache, the tokens that it holds)"""
    _uid_count: int

    @property
    def stream(self) -> mx.Stream: ...

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


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache holds of one sequence after a step: valid only until the next one."""

    uid: int
    tokens: int
    leaves: Cache
    row: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """How many prompt tokens one round may take. `idle` is a multiple of `busy`, `busy` of the block size."""

    idle_tokens: int
    busy_tokens: int
    """At most, while something decodes: every running stream waits for the chunk."""
    block_tokens: int


class Lane:
    def __init__(self, model: LanguageModel, max_rows: int, chunks: Chunks, first_uid: int = 0) -> None:
        """Lanes that may become one need uids of their own: `first_uid` is where this one's begin."""
        self.max_rows = max_rows
        self.chunks = chunks
        self._model = model
        self._rows = 0
        self._steps = 0
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
        self._generator._uid_count = first_uid  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        prompt = cast("_Batch", OnePrompt.of(model, chunks.idle_tokens))
        self._generator._prompt_batch = prompt  # pyright: ignore[reportPrivateUsage]  # see the module's docstring

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
    def prefilling_uid(self) -> int:
        """Only while something is prefilled."""
        waiting = self._generator._unprocessed_sequences  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        return self._prompting.uids[0] if self._prompting.uids else waiting[0][0]

    @property
    def cache_bytes(self) -> int:
        if not self._rows:
            return 0
        waiting = self._generator._unprocessed_sequences  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        caches = [self._prompting.prompt_cache, self._decoding.prompt_cache, *(sequence[3] for sequence in waiting)]
        return bytes_of([leaf for cache in caches for leaf in cache])

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
        caches = [handed_over(cache)]
        (uid,) = self._generator.insert_segments([segments], [UNLIMITED_TOKENS], caches, [prefix], [sampler], [processors])
        self._rows += 1
        return uid

    def decode(self) -> list[tuple[int, int]]:
        """One step for all that decode: (uid, token) of each."""
        if not self._decoding.uids:
            return []
        self._steps += 1
        with mx.stream(self._generator.stream):
            responses = self._decoding.next()
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        return [(response.uid, response.token) for response in responses]

    def next_chunk(self, chunk_tokens: int) -> int:
        """The most tokens that `prefill` would take. Chunks end at multiples of their size, wherever they begin."""
        return chunk_tokens - self._position % chunk_tokens

    def prefill(self, chunk_tokens: int) -> int:
        """One chunk of its prompt; with the last token the sequence joins those that decode. Returns how many tokens it was."""
        generator, decoding, begin = self._generator, self._decoding, self._position
        generator.prefill_step_size = self.next_chunk(chunk_tokens)
        # The generator would decode first: it does not see the batch meanwhile.
        generator._generation_batch = arrived = self._no_batch()  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        generator.next()
        generator._generation_batch = decoding  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        if not arrived.uids:
            return self._position - begin
        with mx.stream(generator.stream):
            decoding.extend(arrived)
        return 1

    def step(self) -> list[tuple[int, int]]:
        """One decode step for all, then one chunk of a prompt."""
        produced = self.decode()
        if self.is_prefilling:
            self.prefill(self.chunks.busy_tokens if self._decoding.uids else self.chunks.idle_tokens)
        return produced

    def absorb(self, other: "Lane") -> None:
        """Takes over all that decodes in the other lane; nothing may be prefilled there."""
        with mx.stream(self._generator.stream):
            self._decoding.extend(other._decoding)
        other._generator._generation_batch = other._no_batch()  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        self._rows, other._rows = self._rows + other._rows, 0

    def held(self) -> Iterator[Held]:
        for batch in (self._prompting, self._decoding):
            for row, (uid, tokens) in enumerate(zip(batch.uids, batch.tokens, strict=True)):
                yield Held(uid, len(tokens), batch.prompt_cache, row)

    def cut_back(self, uid: int, tokens: int) -> None:
        """The sequence ends after so many tokens: what a step produced beyond them is taken back. Here a step produces one."""

    def remove(self, uids: Sequence[int]) -> None:
        self._generator.remove(list(uids))
        self._rows -= len(uids)

    def close(self) -> None:
        self._generator.close()

    @property
    def _prompting(self) -> _Batch:
        return self._generator._prompt_batch  # pyright: ignore[reportPrivateUsage]  # see the module's docstring

    @property
    def _position(self) -> int:
        """How many tokens of the prompt being prefilled are done."""
        waiting = self._generator._unprocessed_sequences  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
        return len(self._prompting.tokens[0] if self._prompting.uids else waiting[0][4])

    def _no_batch(self) -> _Decoding:
        batch = GenerationBatch.empty(self._model, _never)  # pyright: ignore[reportArgumentType]  # as above
        return cast("_Decoding", batch)

    @property
    def _decoding(self) -> _Decoding:
        return self._generator._generation_batch  # pyright: ignore[reportPrivateUsage]  # see the module's docstring

    def _check_internals(self) -> None:
        batches = [getattr(self._generator, name, None) for name in ("_prompt_batch", "_generation_batch")]
        for batch in batches:
            for attribute in ("uids", "tokens", "prompt_cache"):
                if not isinstance(getattr(batch, attribute, None), list):
                    raise LoadFailed(f"this mlx-lm's BatchGenerator has no {attribute}: use the version omlxd was tested with")
        for attribute, kind in (("_unprocessed_sequences", deque), ("_uid_count", int)):
            if not isinstance(getattr(self._generator, attribute, None), kind):
                raise LoadFailed(f"this mlx-lm's BatchGenerator has no {attribute}: use the version omlxd was tested with")


def _never(_: mx.array) -> mx.array:
    raise AssertionError("every sequence has its own sampler")


def segments_of(prompt: Sequence[int], start: int, chunks: Chunks, *extra_edges: int) -> list[list[int]]:
    """The prompt from `start` on, cut where every run of it is cut: a restored run repeats the cold one's chunks bit for bit.

    Edges are the multiples of the idle chunk, the last block boundary that can be restored, and the last token, which is what
    the first answer token is computed from.
    """
    last = len(prompt) - 1
    whole = last // chunks.block_tokens * chunks.block_tokens
    edges = {*range(start // chunks.idle_tokens * chunks.idle_tokens, last, chunks.idle_tokens), whole, last, len(prompt)}
    cuts = [start, *sorted(edge for edge in {*edges, *extra_edges} if start < edge <= len(prompt))]
    return [list(prompt[a:b]) for a, b in itertools.pairwise(cuts)]
