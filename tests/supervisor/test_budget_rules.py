from __future__ import annotations

import pytest

from supervisor.budget import (
    GIB,
    MIB,
    OWN_BYTES,
    RUNTIME_BYTES,
    BudgetSum,
    Shortfall,
    Tier,
    load_bytes,
    load_sum,
    metal_cap_bytes,
    refusal,
    reserve_bytes,
    weights_refusal,
)


def budget_bytes(total_bytes: int, tier: Tier, **limits: int) -> int:
    return BudgetSum(total_bytes, reserve_bytes(total_bytes, tier), **limits).total_bytes


@pytest.mark.parametrize(("tier", "reserve_gib"), [(Tier.SAFE, 8), (Tier.BALANCED, 6), (Tier.AGGRESSIVE, 4), (Tier.CUSTOM, 2)])
def test_each_tier_reserves_its_share_of_ram(tier: Tier, reserve_gib: int) -> None:
    assert budget_bytes(64 * GIB, tier) == (64 - reserve_gib) * GIB


def test_small_systems_reserve_less() -> None:
    assert budget_bytes(16 * GIB, Tier.SAFE) == 12 * GIB
    assert budget_bytes(16 * GIB, Tier.CUSTOM) == 14 * GIB
    assert budget_bytes(24 * GIB, Tier.SAFE) == 16 * GIB


def test_a_tiny_system_still_has_half_its_memory_as_budget() -> None:
    assert budget_bytes(4 * GIB, Tier.BALANCED) == 2 * GIB


def test_the_least_limit_decides_and_says_so() -> None:
    given = {"metal_cap_bytes": 48 * GIB, "models_limit_bytes": 40 * GIB, "tree_limit_bytes": 30 * GIB}
    whole = BudgetSum(64 * GIB, 8 * GIB, **given)
    assert whole.total_bytes == 30 * GIB - OWN_BYTES, "a limit of the tree holds the server's own processes, too"
    assert str(whole) == f"memory.max_process_memory - {OWN_BYTES // MIB / 1024:.1f} GiB for the server itself"
    assert str(BudgetSum(64 * GIB, 8 * GIB, **{**given, "tree_limit_bytes": None})) == "memory.max_model_memory"
    assert str(BudgetSum(64 * GIB, 8 * GIB, 48 * GIB)) == "what the GPU may hold"
    assert str(BudgetSum(64 * GIB, 8 * GIB)) == "64.0 GiB of RAM - 8.0 GiB reserve"


def test_metal_wires_two_thirds_of_small_and_three_quarters_of_large_memory() -> None:
    assert metal_cap_bytes(24 * GIB, None) == 16 * GIB
    assert metal_cap_bytes(64 * GIB, 0) == 48 * GIB
    assert metal_cap_bytes(64 * GIB, 60 * GIB) == 60 * GIB


def test_a_load_reserves_weights_runtime_and_the_kv_floor_of_at_most_8192_tokens() -> None:
    assert load_bytes(5 * GIB, 1000, 4096) == 5 * GIB + RUNTIME_BYTES + 2 * 1000 * 4096
    assert load_bytes(5 * GIB, 1000, 131072) == 5 * GIB + RUNTIME_BYTES + 2 * 1000 * 8192


def test_a_refusal_shows_the_sum() -> None:
    parts = load_sum(18 * GIB, 131072, 32768)
    text = refusal(Shortfall("m", parts.total_bytes, str(parts), 16 * GIB, 4 * GIB, "24.0 GiB of RAM - 8.0 GiB reserve"))
    assert text == (
        "m needs 20.6 GiB (weights 18.0 GiB + runtime 0.6 GiB + KV floor 2.0 GiB) to load; the memory budget is 16.0 GiB "
        "(24.0 GiB of RAM - 8.0 GiB reserve), of which pinned models hold 4.0 GiB: 8.6 GiB too much"
    )


def test_a_refusal_for_its_weights_names_the_limit() -> None:
    text = weights_refusal("m", 9 * GIB, 12 * GIB, 4 * GIB)
    assert text == (
        "m has weights of 9.0 GiB; memory.max_model_weights allows 12.0 GiB for all loaded models, of which pinned models hold "
        "4.0 GiB: 1.0 GiB too much"
    )
