"""What of the prefix cache a model gets, and how that is said: the server's switches, the model's own, its worker's findings.

A model's switch can only take away from what the server allows: there is one store and one janitor. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from supervisor.budget import gib
from supervisor.protocol import Beat, Ready
from supervisor.settings import CacheSettings, ModelSettings
from supervisor.settings_values import Size

HOT_AUTO_SHARE = 16
HOT_AUTO_MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class CachePlan:
    hot_bytes: int
    """Most RAM for KV blocks; 0 = no RAM tier."""
    on_disk: bool
    ssd_dtype: str
    off_because: str = ""
    """Which setting turned it off; empty while any tier is on."""


def plan_cache(server: CacheSettings, own: ModelSettings, budget_bytes: int) -> CachePlan:
    dtype = own.ssd_dtype or server.ssd_dtype
    if not server.enabled or own.cache == "off":
        return CachePlan(0, False, dtype, f"{'models.ID.cache' if server.enabled else 'cache.enabled'} is off")
    hot_bytes = 0 if own.cache == "ssd" else _hot_bytes(own.hot_cache_max_size or server.hot_cache_max_size, budget_bytes)
    on_disk = not server.hot_cache_only and own.cache != "ram"
    why = "" if hot_bytes or on_disk else "the settings leave it neither RAM nor disk"
    return CachePlan(hot_bytes, on_disk, dtype, why)


def _hot_bytes(limit: Size | None, budget_bytes: int) -> int:
    return min(HOT_AUTO_MOST_BYTES, budget_bytes // HOT_AUTO_SHARE) if limit is None else limit.of(budget_bytes)


def cache_state(plan: CachePlan, ready: Ready | None, beat: Beat | None) -> str:
    """One line for people. `ready` and `beat` are what the model's worker said last, None while there is none."""
    capabilities = None if ready is None else ready.capabilities
    if plan.off_because:
        return f"off: {plan.off_because}"
    if capabilities is not None and not capabilities.get("cache"):
        return f"off: {capabilities.get('cache_off_because') or 'the worker does not say why'}"
    disk = "disk" if plan.ssd_dtype == "native" else f"disk as {plan.ssd_dtype}"
    tiers = [f"RAM up to {gib(plan.hot_bytes)}"] * bool(plan.hot_bytes) + [disk] * plan.on_disk
    idle = "" if capabilities is None or beat is None else _idle_because(capabilities, beat)
    alone = "" if capabilities is None else str(capabilities.get("one_at_a_time_because") or "")
    return " + ".join(tiers) + (f"; idle: {idle}" if idle else "") + (f"; one request at a time: {alone}" if alone else "")


def _idle_because(capabilities: Mapping[str, object], beat: Beat) -> str:
    """Empty while it keeps something, or nobody has asked yet."""
    counters = beat.cache
    kept = beat.hot_bytes or any(counters.get(name) for name in ("blocks_written", "hot_hits", "hot_evicted"))
    if kept or not counters.get("asked_tokens"):
        return ""
    dropped = {name.removeprefix("drop_"): n for name, n in counters.items() if name.startswith("drop_") and n}
    if dropped:
        return "blocks cannot be written (" + ", ".join(f"{name} {n}" for name, n in dropped.items()) + ")"
    return f"no prompt has filled a block of {capabilities.get('cache_block_tokens')} tokens yet"
