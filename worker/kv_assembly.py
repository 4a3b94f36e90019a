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
STEP_TOKENS = 256
"""mlx_lm's caches grow by so many rows, and copy all they hold each time."""
ROOM_TOKENS = 1024
"""Beyond what is restored, at most."""


def roomy(restored_tokens: int, prompt_tokens: int) -> int:
    """How many tokens there should be room for."""
    wanted = min(prompt_tokens, restored_tokens + ROOM_TOKENS) + 1
    return -(-wanted // STEP_TOKENS) * STEP_TOKENS


class Assembly:
    """Rows of layers without a window go straight into the arrays that the batch will use, which are larger than what is
    restored: the rest of the prompt and the answer's beginning find room there, and nothing is copied again.
    """

    def __init__(self, layout: Layout, capacity_tokens: int, block_tokens: int) -> None:
        self.tokens = 0
        self._layout = layout
        self._capacity_tokens = capacity_tokens
        self._rows: dict[tuple[int, int], mx.array] = {}
        self._views: dict[tuple[int, int], _Rows] = {}
        self._unallocated = [(group, member) for group in layout.row_groups if group.window is None for member in group.members]
        windows = [g.window for g in layout.row_groups if g.window is not None]
        # Where a missing snapshot may send us back, earlier windows must stay at hand; elsewhere the latest are enough.
        needed = None if layout.has_state else 1 + -(-max(windows, default=1) // block_tokens)
        self._recent: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=needed)
        """(end, rows of a block) of layers with a window"""
        self._has_windows = bool(windows)
        self._state: Mapping[str, Tensor] = {}
        self._done: dict[tuple[int, int], mx.array] = {}
        self._left: list[tuple[RowGroup | StateGroup, int]] = [
            (group, i)
            for group in (*layout.row_groups, *layout.state_groups)
            for i in range(len(group.members))
            if isinstance(group, StateGroup) or group.window is not None
        ]

    def allocate_one(self) -> bool:
        """Makes room for one more array's rows; False when none is left. Nothing may be added before the last."""
        if not self._unallocated:
            return False
        group, member = self._unallocated.pop()
        self._rows[member] = array = mx.zeros((1, group.heads, self._capacity_tokens, group.dim), group.dtype)
        if group.dim:
            bits = array.view(mx.uint16) if group.dtype == mx.bfloat16 else array
            self._views[member] = np.array(bits, copy=False)
        return True

    def add(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """False, and nothing changed, when these are not rows of this layout."""
        end = self.tokens + tokens
        groups = self._layout.row_groups
        if end > self._capacity_tokens or not all(fits(tensors, g.name, g.dtype, g.shape(g.rows(tokens))) for g in groups):
            return False
        for group in groups:
            if group.window is None and group.dim:
                for member, rows in zip(group.members, _array(tensors[group.name], group.dtype), strict=True):
                    self._views[member][:, :, self.tokens : end] = rows
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
        """Turns one more of the other arrays into MLX's; False when none is left. Nothing may be added after the first."""
        if not self._left:
            return False
        group, i = self._left.pop()
        array = mx.array(self._values(group, i))  # pyright: ignore[reportArgumentType]  # takes numpy arrays; its stubs do not say so
        self._done[group.members[i]] = array.view(mx.bfloat16) if group.dtype == mx.bfloat16 else array
        return True

    def cache(self, fresh: Cache) -> Cache:
        """`fresh`, a new cache of the model, filled: to be handed to the batch. Once."""
        self._views.clear()  # an array that is looked at is copied when the batch writes to it
        self._done |= self._rows
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
        assert group.window is not None, "the others are in place already"
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
