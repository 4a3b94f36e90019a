"""How much memory models may have, and how much one needs to load: arithmetic on numbers others have measured.

Knows nothing of workers or of who holds what (pool.py does), and reads no meter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20
GIB = 1 << 30

RUNTIME_BYTES = 614 * MIB  # 0.6 GiB: interpreter, MLX, tokenizer and the compiled kernels of one worker
KV_FLOOR_TOKENS = 8192
KV_COPIES = 2  # joining, leaving and growing a batch copies the cache

OWN_BYTES = 320 * MIB  # supervisor, gateway, text worker and janitor: what a limit of the whole tree leaves to them

SMALL_RAM_BYTES = 24 * GIB
SMALL_RESERVE_BYTES = 4 * GIB
METAL_LARGE_RAM_BYTES = 36 * GIB


class Tier(StrEnum):
    SAFE = "safe"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    CUSTOM = "custom"


RESERVES_BYTES = {Tier.SAFE: 8 * GIB, Tier.BALANCED: 6 * GIB, Tier.AGGRESSIVE: 4 * GIB, Tier.CUSTOM: 2 * GIB}


def reserve_bytes(total_ram_bytes: int, tier: Tier) -> int:
    """What stays for the system: by tier, 4 GiB at most under 24 GiB of RAM, never more than half of it."""
    reserve = RESERVES_BYTES[tier]
    if total_ram_bytes < SMALL_RAM_BYTES:
        reserve = min(reserve, SMALL_RESERVE_BYTES)
    return min(reserve, total_ram_bytes // 2)


def metal_cap_bytes(total_ram_bytes: int, wired_limit_bytes: int | None) -> int:
    """What Metal will wire before any worker lives: the system's setting (0 is "not set"), else its default share."""
    if wired_limit_bytes:
        return wired_limit_bytes
    if total_ram_bytes >= METAL_LARGE_RAM_BYTES:
        return total_ram_bytes * 3 // 4
    return total_ram_bytes * 2 // 3


@dataclass(frozen=True, slots=True)
class LoadSum:
    """What a load reserves, part by part, so that a refusal can show it."""

    weights_bytes: int
    runtime_bytes: int
    kv_floor_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.runtime_bytes + self.kv_floor_bytes

    def __str__(self) -> str:
        parts = (("weights", self.weights_bytes), ("runtime", self.runtime_bytes), ("KV floor", self.kv_floor_bytes))
        return " + ".join(f"{name} {gib(size)}" for name, size in parts)


def load_sum(weights_bytes: int, kv_bytes_per_token: int, context_tokens: int) -> LoadSum:
    kv_floor = min(context_tokens, KV_FLOOR_TOKENS) * kv_bytes_per_token * KV_COPIES
    return LoadSum(weights_bytes, RUNTIME_BYTES, kv_floor)


def load_bytes(weights_bytes: int, kv_bytes_per_token: int, context_tokens: int) -> int:
    return load_sum(weights_bytes, kv_bytes_per_token, context_tokens).total_bytes


@dataclass(frozen=True, slots=True)
class BudgetSum:
    """How the budget came about: the least of these is it."""

    total_ram_bytes: int
    reserve_bytes: int
    metal_cap_bytes: int | None = None
    models_limit_bytes: int | None = None
    tree_limit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return max(0, min(size for _, size in self._parts()))

    def _parts(self) -> list[tuple[str, int]]:
        ram, reserve = self.total_ram_bytes, self.reserve_bytes
        parts = [
            (f"{gib(ram)} of RAM - {gib(reserve)} reserve", ram - reserve),
            ("what the GPU may hold", self.metal_cap_bytes),
            ("memory.max_model_memory", self.models_limit_bytes),
            (f"memory.max_process_memory - {gib(OWN_BYTES)} for the server itself", self._of_tree()),
        ]
        return [(name, size) for name, size in parts if size is not None]

    def _of_tree(self) -> int | None:
        return None if self.tree_limit_bytes is None else self.tree_limit_bytes - OWN_BYTES

    def __str__(self) -> str:
        """The one that decides."""
        return min(self._parts(), key=lambda part: part[1])[0]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a load can never fit as things stand."""

    model: str
    load_bytes: int
    load_detail: str  # str(LoadSum), or ""
    budget_bytes: int
    pinned_bytes: int  # held by pinned models, which are never evicted
    budget_detail: str = ""


def refusal(shortfall: Shortfall) -> str:
    detail = f" ({shortfall.load_detail})" if shortfall.load_detail else ""
    of_budget = f" ({shortfall.budget_detail})" if shortfall.budget_detail else ""
    held = f", of which pinned models hold {gib(shortfall.pinned_bytes)}" if shortfall.pinned_bytes else ""
    missing = shortfall.load_bytes - (shortfall.budget_bytes - shortfall.pinned_bytes)
    return (
        f"{shortfall.model} needs {gib(shortfall.load_bytes)}{detail} to load; the memory budget is "
        f"{gib(shortfall.budget_bytes)}{of_budget}{held}: {gib(missing)} too much"
    )


def weights_refusal(model: str, weights_bytes: int, limit_bytes: int, pinned_bytes: int) -> str:
    held = f", of which pinned models hold {gib(pinned_bytes)}" if pinned_bytes else ""
    missing = weights_bytes - (limit_bytes - pinned_bytes)
    return (
        f"{model} has weights of {gib(weights_bytes)}; memory.max_model_weights allows {gib(limit_bytes)} for all loaded "
        f"models{held}: {gib(missing)} too much"
    )


def gib(size_bytes: int) -> str:
    """Sizes under a tenth of a GiB in MiB, so that a small model's sum does not read 0.0."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB // 10 else f"{size_bytes / MIB:.1f} MiB"
