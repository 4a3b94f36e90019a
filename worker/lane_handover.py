"""A sequence's rows go from restore to prefill, and from prefill to decode, as they are.

mlx_lm copies the whole cache at both steps, as if the sequence shared it with others: a merge of one, and a batch of one split
from itself. A lane prefills one prompt at a time, so neither is needed. As found in mlx-lm 0.32.2.
"""

import copy
from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch  # pyright: ignore[reportMissingTypeStubs]
from mlx_lm.models.cache import BatchKVCache, KVCache  # pyright: ignore[reportMissingTypeStubs]

from worker.mlx_types import Cache, CacheLeaf, LanguageModel


class _Rows(Protocol):
    keys: mx.array
    values: mx.array
    offset: int


class _BatchedRows(Protocol):
    keys: mx.array
    values: mx.array
    offset: mx.array
    _idx: int


class _Alone:
    """One layer's rows of a single sequence, which a batch takes over instead of a copy."""

    def __init__(self, rows: CacheLeaf) -> None:
        self._rows = rows

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def empty(self) -> bool:
        return self._rows.empty()

    @property
    def state(self) -> object:
        return self._rows.state

    def merge(self, caches: Sequence["_Alone"]) -> CacheLeaf:
        """What mlx_lm makes a batch with."""
        if len(caches) > 1:
            raise ValueError("a lane prefills one prompt at a time")
        own, batched = cast("_Rows", self._rows), BatchKVCache([0])
        whole = cast("_BatchedRows", batched)
        whole.keys, whole.values, whole._idx = own.keys, own.values, own.offset  # pyright: ignore[reportPrivateUsage]  # no other way in
        whole.offset = mx.array([own.offset])
        return cast("CacheLeaf", batched)


def handed_over(cache: Cache) -> Cache:
    """`cache`, for a batch of its own. Layers of other kinds than plain rows are merged as ever: they are small, or rare."""
    return [_Alone(leaf) if type(leaf) is KVCache and leaf.keys is not None else leaf for leaf in cache]


class OnePrompt(PromptProcessingBatch):
    """The batch that a lane's prompt is prefilled in."""

    @classmethod
    def of(cls, model: LanguageModel, prefill_step_size: int) -> "OnePrompt":
        return cls.empty(model, _never, prefill_step_size)  # pyright: ignore[reportArgumentType]  # structural type here, nn.Module there

    def split(self, indices: list[int]) -> PromptProcessingBatch:
        if len(indices) != len(self.uids):
            return super().split(indices)
        whole = copy.copy(self)
        self.__dict__ |= OnePrompt.empty(self.model, self.fallback_sampler, self.prefill_step_size).__dict__
        return whole


def _never(_: mx.array) -> mx.array:
    raise AssertionError("every sequence has its own sampler")
