"""KV caches in few bits: which leaves of a model's cache become quantized ones, from which token on, and what that costs.

From `start` tokens on, all rows are kept quantized, and all that follows attends to the quantized ones; rows before `start`
are computed at full precision. That rule does not depend on where chunks end, so a run that begins with restored rows computes
what a cold one does. mlx_lm cannot batch such caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from worker.faults import ModelUnloadable
from worker.kv_leaves import leaves_of
from worker.mlx_types import Cache, CacheLeaf

QUANTIZED = "QuantizedKVCache"


class _Plain(Protocol):
    def to_quantized(self, group_size: int, bits: int) -> CacheLeaf: ...


@dataclass(frozen=True, slots=True)
class KvQuantizing:
    bits: int
    group_size: int
    start: int
    """How many tokens stay as they are until there are more."""

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> "KvQuantizing | None":
        """None where the assignment's settings do not want it."""
        bits, group_size, start = (settings.get(name) for name in ("kv_bits", "kv_group_size", "quantized_kv_start"))
        if not (isinstance(bits, int) and isinstance(group_size, int) and isinstance(start, int)):
            return None
        return cls(bits, group_size, start)

    def quantize(self, cache: Cache) -> None:
        """Changes the leaves in place, with what they hold; state stays. Raises ModelUnloadable where there are no rows."""
        for index, leaf in enumerate(cache):
            if hasattr(leaf, "to_quantized"):
                try:
                    cache[index] = cast("_Plain", leaf).to_quantized(group_size=self.group_size, bits=self.bits)
                except NotImplementedError as e:
                    raise self.refused(f"mlx-lm cannot quantize {type(leaf).__name__}") from e
        if not any(type(leaf).__name__ == QUANTIZED for _, leaf in leaves_of(cache)):
            kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves_of(cache)}))
            raise self.refused(f"its cache is made of {kinds}")

    def settle(self, cache: Cache, tokens: int) -> None:
        """Call whenever the cache has grown to that many tokens: quantizes it when it is time."""
        if tokens >= self.start and any(hasattr(leaf, "to_quantized") for leaf in cache):
            self.quantize(cache)

    def stop(self, begin: int, end: int) -> int:
        """Where a chunk from `begin` to `end` must end: one before `start` does not reach beyond it."""
        return self.start if begin < self.start < end else end

    def refused(self, reason: str) -> ModelUnloadable:
        return ModelUnloadable(
            f"kv_bits {self.bits} with kv_group_size {self.group_size} cannot be used with this model: {reason}"
        )

    @property
    def key(self) -> bytes:
        """What of it is not in the layout of the cache."""
        return f"quantized from {self.start}".encode()
