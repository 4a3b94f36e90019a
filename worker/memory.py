"""MLX's own memory limits, set in one place. They are soft: what may be admitted is decided by arithmetic elsewhere."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from worker.admission import KvCost
from worker.kv_leaves import bytes_of, leaves_of
from worker.mlx_types import Cache

RUNTIME_BYTES = 640 << 20
CACHE_BYTES = 512 << 20
"""Freed buffers MLX may keep for reuse."""


def limit_memory(weights_bytes: int, kv_bytes: int) -> None:
    """Call again after every BatchGenerator is built or closed: both set the wired limit to what the device recommends."""
    if kv_bytes <= 0:
        return
    limit_bytes = weights_bytes + kv_bytes + RUNTIME_BYTES
    mx.set_memory_limit(limit_bytes)
    mx.set_cache_limit(CACHE_BYTES)
    if mx.metal.is_available():
        mx.set_wired_limit(limit_bytes)


def kv_cost(warm: Cache) -> KvCost:
    """What a sequence costs, measured at a cache that has seen a few tokens; recurrent state does not grow with them."""
    layers: list[tuple[int, int | None]] = []
    state_bytes = 0
    for _, leaf in leaves_of(warm):
        keys, window = getattr(leaf, "keys", None), getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", None)
        rows = cast("Sequence[object]", keys)[0] if isinstance(keys, list | tuple) else keys  # quantized ones come in parts
        if isinstance(rows, mx.array) and rows.ndim == 4:
            layers.append((leaf.nbytes // rows.shape[2], window))
        else:
            state_bytes += bytes_of([leaf])
    return KvCost(tuple(layers), state_bytes=state_bytes)
