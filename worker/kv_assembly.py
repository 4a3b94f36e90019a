"""A cache being put together from blocks, in order, in steps small enough to fit between two decode steps.

Bytes in, filled cache out. Must not know keys, tiers or requests.
"""

from collections import deque
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cachestore.block import Tensor
from worker.kv import DTYPES, Layout, RowGroup, StateGroup, fits
from worker.kv_leaves import LeafKind, arrays_of, fill_rows, leaves_of
from worker.mlx_types import Cache, CacheLeaf

_Rows = NDArray[np.generic]


class Assembly:
    def __init__(self, layout: Layout, capacity_tokens: int, block_tokens: int) -> None:
        self.tokens = 0
        self._layout = layout
        self._capacity_tokens = capacity_tokens
        self._rows = {
            g.name: np.empty(g.shape(capacity_tokens), DTYPES[g.dtype][1]) for g in layout.row_groups if g.window is None
        }
        windows = [g.window for g in layout.row_groups if g.window is not None]
        # Where a missing snapshot may send us back, earlier windows must stay at hand; elsewhere the latest are enough.
        needed = None if layout.has_state else 1 + -(-max(windows, default=1) // block_tokens)
        self._recent: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=needed)
        """(end, rows of a block) of layers with a window"""
        self._has_windows = bool(windows)
        self._state: Mapping[str, Tensor] = {}
        self._done: dict[tuple[int, int], mx.array] = {}
        self._left: list[tuple[RowGroup | StateGroup, int]] = [
            (group, i) for group in (*layout.row_groups, *layout.state_groups) for i in range(len(group.members))
        ]

    def add(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """False, and nothing changed, when these are not rows of this layout."""
        end = self.tokens + tokens
        groups = self._layout.row_groups
        if end > self._capacity_tokens or not all(fits(tensors, g.name, g.dtype, g.shape(g.rows(tokens))) for g in groups):
            return False
        for group in groups:
            if group.window is None and group.dim:
                rows = self._rows[group.name]
                rows[:, :, :, self.tokens : end] = _array(tensors[group.name], group.dtype)
        if self._has_windows:
            self._recent.append((end, tensors))
        self.tokens = end
        return True

    def add_state(self, tensors: Mapping[str, Tensor]) -> bool:
        """The state after all that was added. False when it is none of this layout."""
        if not all(fits(tensors, g.name, g.dtype, g.shape) for g in self._layout.state_groups):
            return False
        self._state = tensors
        return True

    def skip(self, tokens: int) -> None:
        """For layouts without rows: the state alone says all of the first `tokens` tokens."""
        self.tokens = tokens

    def cut_back(self, tokens: int) -> None:
        """Forgets what was added beyond that block boundary."""
        while self._recent and self._recent[-1][0] > tokens:
            self._recent.pop()
        self.tokens = tokens

    def convert_one(self) -> bool:
        """Turns one more array into MLX's; False when none is left. Nothing may be added after the first."""
        if not self._left:
            return False
        group, i = self._left.pop()
        array = mx.array(self._values(group, i))  # pyright: ignore[reportArgumentType]  # takes numpy arrays; its stubs do not say so
        self._done[group.members[i]] = array.view(mx.bfloat16) if group.dtype == mx.bfloat16 else array
        return True

    def cache(self, fresh: Cache) -> Cache:
        """`fresh`, a new cache of the model, filled: to be handed to the batch."""
        for index, (described, (_, leaf)) in enumerate(zip(self._layout.leaves, leaves_of(fresh), strict=True)):
            if described.kind is LeafKind.STATE:
                self._fill_state(index, leaf)
            else:
                count = sum(key[0] == index for key in self._done)
                fill_rows(leaf, [self._done[index, which] for which in range(count)], self.tokens)
        return fresh

    def _fill_state(self, index: int, leaf: CacheLeaf) -> None:
        arrays = arrays_of(leaf)
        for (owner, which), array in self._done.items():
            if owner == index:
                arrays[which] = array

    def _values(self, group: RowGroup | StateGroup, member: int) -> _Rows:
        if isinstance(group, StateGroup):
            return _array(self._state[group.name], group.dtype)[member]
        if group.window is None:
            return self._rows[group.name][member, :, :, : self.tokens]
        rows = np.empty((1, group.heads, min(self.tokens, group.window), group.dim), DTYPES[group.dtype][1])
        end = rows.shape[2]
        for _, tensors in reversed(self._recent):
            if not end or not group.dim:
                break
            own = _array(tensors[group.name], group.dtype)[member]
            taken = min(end, own.shape[2])
            rows[:, :, end - taken : end] = own[:, :, own.shape[2] - taken :]
            end -= taken
        if end and group.dim:
            raise ValueError(f"{end} rows of a window of {group.window} are missing")
        return rows


def _array(tensor: Tensor, dtype: mx.Dtype) -> _Rows:
    return np.frombuffer(tensor.data, DTYPES[dtype][1]).reshape(tensor.shape)
