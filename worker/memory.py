"""MLX's own memory limits, set in one place. They are soft: what may be admitted is decided by arithmetic elsewhere."""

import mlx.core as mx

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
