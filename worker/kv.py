"""KV caches as blocks of bytes: which arrays a block or a snapshot is made of, and how they are copied out of a live batch.

Knows how leaves are grouped into few tensors, as many small ones make a file read three times slower; must not know keys, tiers
or requests. Back from bytes to caches goes `worker.kv_assembly`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cachestore.block import Tensor
from worker.kv_leaves import Leaf, LeafKind, NotCacheable, arrays_of, columns_of, describe, leaves_of, parts_of, slice_row
from worker.lanes import Held
from worker.mlx_types import Cache, CacheLeaf, evaluate

# bf16 has no numpy type: its bits travel as uint16.
DTYPES: dict[mx.Dtype, tuple[str, type[np.generic]]] = {
    mx.float32: ("F32", np.float32),
    mx.float16: ("F16", np.float16),
    mx.bfloat16: ("BF16", np.uint16),
    mx.uint32: ("U32", np.uint32),
    mx.int32: ("I32", np.int32),
}
Member = tuple[int, int]
"""(leaf, which of its arrays)"""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Arrays of equal shape `[1, heads, tokens, dim]`, stacked in this order."""

    name: str
    heads: int
    dim: int
    dtype: mx.Dtype
    window: int | None
    """A block keeps only the last so many of its rows."""
    members: tuple[Member, ...]

    def rows(self, tokens: int) -> int:
        return tokens if self.window is None else min(tokens, self.window)

    def shape(self, rows: int) -> tuple[int, ...]:
        return (len(self.members), 1, self.heads, rows, self.dim)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Arrays of equal shape, stacked in this order. `own_shape` begins with 1, for one sequence."""

    name: str
    own_shape: tuple[int, ...]
    dtype: mx.Dtype
    members: tuple[Member, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.members), *self.own_shape)


@dataclass(frozen=True, slots=True)
class Layout:
    leaves: tuple[Leaf, ...]
    row_groups: tuple[RowGroup, ...]
    state_groups: tuple[StateGroup, ...]

    @classmethod
    def of(cls, cache: Cache) -> "Layout":
        """The layout of a model from a cache it has filled. Raises NotCacheable."""
        found = list(leaves_of(cache))
        described = [describe(path, leaf) for path, leaf in found]
        rows: dict[tuple[int, int, mx.Dtype, int | None], list[Member]] = {}
        states: dict[tuple[tuple[int, ...], mx.Dtype], list[Member]] = {}
        for index, (leaf, (_, live)) in enumerate(zip(described, found, strict=True)):
            if leaf.kind is LeafKind.STATE:
                for which, array in enumerate(arrays_of(live)):
                    if array is not None:
                        states.setdefault((array.shape, _known(leaf, array)), []).append((index, which))
                continue
            for which, array in enumerate(parts_of(live)):
                kind = (array.shape[1], array.shape[3], _known(leaf, array), leaf.window)
                rows.setdefault(kind, []).append((index, which))
        return cls(
            leaves=tuple(described),
            row_groups=tuple(RowGroup(f"kv{i}", *kind, tuple(members)) for i, (kind, members) in enumerate(rows.items())),
            state_groups=tuple(
                StateGroup(f"state{i}", *kind, tuple(members)) for i, (kind, members) in enumerate(states.items())
            ),
        )

    @property
    def has_rows(self) -> bool:
        return bool(self.row_groups)

    @property
    def has_state(self) -> bool:
        """A block boundary can only be restored where a snapshot was taken."""
        return bool(self.state_groups)

    def parts(self) -> list[bytes]:
        """What the layout hash is made of."""
        return [repr(part).encode() for part in (*self.leaves, *self.row_groups, *self.state_groups)]

    def cut(self, held: Held, spans: Sequence[tuple[int, int]]) -> list[dict[str, Tensor] | None]:
        """Copies the rows of each span of positions out of the live batch, computed at once; None where they are gone already.

        A slice left lazy would keep the batch's buffer alive, and the next step would copy the whole cache to add a row.
        """
        live = [leaf for _, leaf in leaves_of(held.leaves)]
        cuts = [self._cut(live, held, start, end) for start, end in spans]
        evaluate([array for arrays in cuts if arrays is not None for array in arrays])
        return [None if arrays is None else _tensors(self.row_groups, arrays) for arrays in cuts]

    def copy_state(self, held: Held) -> "State | None":
        """The sequence's recurrent state as it is now; None when it has not the shape that the warm-up saw."""
        live = [leaf for _, leaf in leaves_of(held.leaves)]
        stateful = [leaf for leaf, described in zip(live, self.leaves, strict=True) if described.kind is LeafKind.STATE]
        present = sum(array is not None for leaf in stateful for array in arrays_of(leaf))
        if present != sum(len(group.members) for group in self.state_groups):
            return None
        stacked: list[mx.array] = []
        for group in self.state_groups:
            arrays = [arrays_of(live[leaf])[which] for leaf, which in group.members]
            own = [array[held.row : held.row + 1] for array in arrays if array is not None]
            if len(own) < len(arrays) or any(array.shape != group.own_shape or array.dtype != group.dtype for array in own):
                return None
            stacked.append(mx.stack(own))
        evaluate(stacked)
        return State(self.state_groups, tuple(stacked))

    def _cut(self, live: Sequence[CacheLeaf], held: Held, start: int, end: int) -> list[mx.array] | None:
        stacked: list[mx.array] = []
        for group in self.row_groups:
            rows: list[mx.array] = []
            for leaf, which in group.members:
                columns = columns_of(live[leaf])
                stop = columns.end - (held.tokens - end)
                begin = stop - group.rows(end - start)
                if begin < 0:
                    return None
                rows.append(slice_row(parts_of(live[leaf])[which], held.row, begin, stop, columns.turn))
            stacked.append(mx.stack(rows))
        return stacked


@dataclass(frozen=True, slots=True)
class State:
    """A copy of recurrent state, not yet bytes: most copies are replaced by the next one before anyone needs those."""

    groups: tuple[StateGroup, ...]
    arrays: tuple[mx.array, ...]

    def tensors(self) -> dict[str, Tensor]:
        return _tensors(self.groups, self.arrays)


def _tensors(groups: Sequence[RowGroup | StateGroup], arrays: Sequence[mx.array]) -> dict[str, Tensor]:
    # Arrays without a single item have no bytes to keep (some models store keys and no values).
    return {group.name: _tensor(array) for group, array in zip(groups, arrays, strict=True) if array.size}


def _tensor(array: mx.array) -> Tensor:
    name, _ = DTYPES[array.dtype]
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return Tensor(name, tuple(array.shape), memoryview(plain).tobytes())  # pyright: ignore[reportArgumentType]  # has the buffer protocol


def fits(tensors: Mapping[str, Tensor], name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> bool:
    """Whether that tensor is there and is what the layout says."""
    if 0 in shape:
        return True
    tensor = tensors.get(name)
    return tensor is not None and tensor.dtype == DTYPES[dtype][0] and tensor.shape == shape


def _known(leaf: Leaf, array: mx.array) -> mx.Dtype:
    if array.dtype not in DTYPES:
        raise NotCacheable(f"layer {leaf.path} keeps {array.dtype} arrays")
    return array.dtype
