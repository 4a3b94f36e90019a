"""KV caches as blocks of bytes, and back.

Knows mlx_lm's cache classes and how their rows lie in memory; must not know keys, tiers or requests. A block's tensors are few:
all keys and values of equal shape are stacked, as many small tensors make a file read three times slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache  # pyright: ignore[reportMissingTypeStubs]

from cachestore.block import Tensor
from worker.lanes import Held
from worker.mlx_types import Cache, PlainKV, evaluate

# bf16 has no numpy type: its bits travel as uint16.
_DTYPES: dict[mx.Dtype, tuple[str, type[np.generic]]] = {
    mx.float32: ("F32", np.float32),
    mx.float16: ("F16", np.float16),
    mx.bfloat16: ("BF16", np.uint16),
}
PARTS = ("keys", "values")


class NotCacheable(Exception):
    """Why blocks of this model cannot be kept; the message is shown in status."""


@dataclass(frozen=True, slots=True)
class Group:
    """Arrays of equal shape `[1, heads, tokens, dim]`, stacked in this order."""

    name: str
    heads: int
    dim: int
    dtype: mx.Dtype
    members: tuple[tuple[int, str], ...]
    """(layer, "keys" or "values")"""

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (len(self.members), 1, self.heads, tokens, self.dim)


@dataclass(frozen=True, slots=True)
class Layout:
    layers: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, cache: Cache) -> "Layout":
        """The layout of a model from a cache it has filled. Raises NotCacheable."""
        found: dict[tuple[int, int, mx.Dtype], list[tuple[int, str]]] = {}
        for layer, leaf in enumerate(cache):
            if type(leaf) is not KVCache:
                raise NotCacheable(f"layer {layer} uses {type(leaf).__name__}; only plain KVCache layers are kept so far")
            for part in PARTS:
                array = cast("mx.array", getattr(leaf, part))
                if array.dtype not in _DTYPES:
                    raise NotCacheable(f"layer {layer} keeps its {part} as {array.dtype}")
                found.setdefault((array.shape[1], array.shape[3], array.dtype), []).append((layer, part))
        groups = [Group(f"kv{i}", *kind, tuple(members)) for i, (kind, members) in enumerate(found.items())]
        return cls(len(cache), tuple(groups))

    def parts(self) -> list[bytes]:
        """What the layout hash is made of."""
        return [f"{g.name} {g.heads} {g.dim} {g.dtype} {g.members}".encode() for g in self.groups]

    def cut(self, held: Held, spans: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Copies the rows of each span of positions out of the live batch, computed at once.

        A slice left lazy would keep the batch's buffer alive, and the next step would copy the whole cache to add a row.
        """
        padding = int(held.leaves[0].left_padding[held.row].item())  # pyright: ignore[reportArgumentType]  # an integer array
        cuts = [[self._stack(group, held, padding + a, padding + b) for group in self.groups] for a, b in spans]
        evaluate([array for arrays in cuts for array in arrays])
        return [{g.name: _tensor(a) for g, a in zip(self.groups, arrays, strict=True)} for arrays in cuts]

    def _stack(self, group: Group, held: Held, start: int, end: int) -> mx.array:
        arrays = [cast("mx.array", getattr(held.leaves[layer], part)) for layer, part in group.members]
        return mx.stack([array[held.row : held.row + 1, :, start:end, :] for array in arrays])


def _tensor(array: mx.array) -> Tensor:
    name, _ = _DTYPES[array.dtype]
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return Tensor(name, tuple(array.shape), memoryview(plain).tobytes())  # pyright: ignore[reportArgumentType]  # has the buffer protocol


class Assembly:
    """A cache being put together from blocks, in order, in steps small enough to fit between two decode steps."""

    def __init__(self, layout: Layout, capacity_tokens: int) -> None:
        self.tokens = 0
        self._capacity_tokens = capacity_tokens
        self._layout = layout
        self._rows = {g.name: np.empty(g.shape(capacity_tokens), _DTYPES[g.dtype][1]) for g in layout.groups}
        self._done: list[dict[str, mx.array]] = [{} for _ in range(layout.layers)]
        self._left = [(group, i) for group in layout.groups for i in range(len(group.members))]

    def add(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """False, and nothing changed, when these are not rows of this layout."""
        end = self.tokens + tokens
        if end > self._capacity_tokens:
            return False
        for group in self._layout.groups:
            tensor = tensors.get(group.name)
            if tensor is None or tensor.dtype != _DTYPES[group.dtype][0] or tensor.shape != group.shape(tokens):
                return False
        for group in self._layout.groups:
            tensor, rows = tensors[group.name], self._rows[group.name]
            rows[:, :, :, self.tokens : end] = np.frombuffer(tensor.data, rows.dtype).reshape(tensor.shape)
        self.tokens = end
        return True

    def convert_one(self) -> bool:
        """Turns one more array into MLX's; False when none is left."""
        if not self._left:
            return False
        group, i = self._left.pop()
        layer, part = group.members[i]
        rows = self._rows[group.name][i, :, :, : self.tokens]
        array = mx.array(rows)  # pyright: ignore[reportArgumentType]  # takes numpy arrays; its stubs do not say so
        self._done[layer][part] = array.view(mx.bfloat16) if group.dtype == mx.bfloat16 else array
        return True

    def cache(self) -> Cache:
        """The finished cache, to be handed to the batch."""
        leaves: Cache = []
        for arrays in self._done:
            leaf = cast("PlainKV", KVCache())
            leaf.keys, leaf.values, leaf.offset = arrays["keys"], arrays["values"], self.tokens
            leaves.append(leaf)
        return leaves
