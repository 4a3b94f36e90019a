from __future__ import annotations

import pytest

from supervisor.budget import GIB, RUNTIME_BYTES, Shortfall, Tier, budget_bytes, load_bytes, load_sum, metal_cap_bytes, refusal


@pytest.mark.parametrize(("tier", "reserve_gib"), [(Tier.SAFE, 8), (Tier.BALANCED, 6), (Tier.AGGRESSIVE, 4), (Tier.CUSTOM, 2)])
def test_each_tier_reserves_its_share_of_ram(tier: Tier, reserve_gib: int) -> None:
    assert budget_bytes(64 * GIB, tier) == (64 - reserve_gib) * GIB


def test_small_systems_reserve_less() -> None:
    assert budget_bytes(16 * GIB, Tier.SAFE) == 12 * GIB
    assert budget_bytes(16 * GIB, Tier.CUSTOM) == 14 * GIB
    assert budget_bytes(24 * GIB, Tier.SAFE) == 16 * GIB


def test_a_tiny_system_still_has_half_its_memory_as_budget() -> None:
    assert budget_bytes(4 * GIB, Tier.BALANCED) == 2 * GIB


def test_the_least_limit_decides() -> None:
    assert budget_bytes(64 * GIB, Tier.SAFE, [40 * GIB, 30 * GIB], 48 * GIB) == 30 * GIB
    assert budget_bytes(64 * GIB, Tier.SAFE, [], 48 * GIB) == 48 * GIB


def test_metal_wires_two_thirds_of_small_and_three_quarters_of_large_memory() -> None:
    assert metal_cap_bytes(24 * GIB, None) == 16 * GIB
    assert metal_cap_bytes(64 * GIB, 0) == 48 * GIB
    assert metal_cap_bytes(64 * GIB, 60 * GIB) == 60 * GIB


def test_a_load_reserves_weights_runtime_and_the_kv_floor_of_at_most_8192_tokens() -> None:
    assert load_bytes(5 * GIB, 1000, 4096) == 5 * GIB + RUNTIME_BYTES + 2 * 1000 * 4096
    assert load_bytes(5 * GIB, 1000, 131072) == 5 * GIB + RUNTIME_BYTES + 2 * 1000 * 8192


def test_a_refusal_shows_the_sum() -> None:
    parts = load_sum(18 * GIB, 131072, 32768)
    text = refusal(Shortfall("m", parts.total_bytes, str(parts), 16 * GIB, 4 * GIB))
    assert text == (
        "m needs 20.6 GiB (weights 18.0 GiB + runtime 0.6 GiB + KV floor 2.0 GiB) to load; the memory budget is 16.0 GiB, "
        "of which pinned models hold 4.0 GiB: 8.6 GiB too much"
    )
