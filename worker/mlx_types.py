"""The shapes of what crosses over from mlx_lm, which ships no types, and the few MLX calls whose stubs say too little.

Used only by worker files that may import MLX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities `[rows, vocabulary]` to token ids `[rows]`."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""All token ids so far `[n]` and logits `[1, vocabulary]` to changed logits."""


class CacheLeaf(Protocol):
    """One layer's cache, of one sequence or of a batch: `KVCache` and its kin. What is in it, `worker.kv_leaves` knows."""

    @property
    def nbytes(self) -> int: ...

    def empty(self) -> bool: ...

    @property
    def state(self) -> object:
        """All its arrays, nested."""
        ...


Cache = list[CacheLeaf]


class LanguageModel(Protocol):
    def __call__(self, inputs: mx.array, *, cache: Cache) -> mx.array: ...

    def parameters(self) -> Mapping[str, object]: ...


def evaluate(arrays: Sequence[mx.array]) -> None:
    """Computes them now."""
    mx.eval(list(arrays))  # pyright: ignore[reportUnknownMemberType]


def summed_at(size: int, positions: mx.array, values: mx.array) -> mx.array:
    """float32 `[size]`: zeros with `values` added at `positions`; equal positions add up."""
    return mx.zeros(size).at[positions].add(values)  # pyright: ignore[reportUnknownMemberType]
