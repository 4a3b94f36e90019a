"""What a model gets of the prefix cache, and how status says it."""

import pytest

from supervisor.cache_plan import CachePlan, cache_state, plan_cache
from supervisor.protocol import Beat, Ready
from supervisor.settings import CacheSettings, ModelSettings
from supervisor.settings_values import Size

GIB = 2**30
BUDGET = 32 * GIB
BOTH = CachePlan(2 * GIB, True, "native")


def ready(**capabilities: object) -> Ready:
    sizes = {"context": 1, "weights_bytes": 1, "kv_bytes_per_token": 1, "peak_bytes": 1, "max_inflight": 1, "load_s": 1.0}
    return Ready(**sizes, capabilities={"cache": True, "cache_block_tokens": 256, **capabilities})  # pyright: ignore


@pytest.mark.parametrize(
    ("server", "own", "tiers"),
    [
        (CacheSettings(), ModelSettings(), (2 * GIB, True)),
        (CacheSettings(), ModelSettings(cache="ram"), (2 * GIB, False)),
        (CacheSettings(), ModelSettings(cache="ssd"), (0, True)),
        (CacheSettings(), ModelSettings(cache="off"), (0, False)),
        (CacheSettings(hot_cache_only=True), ModelSettings(cache="ssd"), (0, False)),
        (CacheSettings(enabled=False), ModelSettings(cache="ram"), (0, False)),
        (CacheSettings(hot_cache_max_size=Size(bytes=5)), ModelSettings(), (5, True)),
        (CacheSettings(hot_cache_max_size=Size(bytes=5)), ModelSettings(hot_cache_max_size=Size(bytes=0)), (0, True)),
    ],
)
def test_a_models_switch_takes_away_from_what_the_server_allows(
    server: CacheSettings, own: ModelSettings, tiers: tuple[int, bool]
) -> None:
    plan = plan_cache(server, own, BUDGET)
    assert (plan.hot_bytes, plan.on_disk) == tiers
    assert bool(plan.off_because) == (tiers == (0, False)), "whatever is off says which setting did it"


def test_a_models_dtype_goes_before_the_servers() -> None:
    assert plan_cache(CacheSettings(ssd_dtype="int8"), ModelSettings(), BUDGET).ssd_dtype == "int8"
    assert plan_cache(CacheSettings(ssd_dtype="int8"), ModelSettings(ssd_dtype="native"), BUDGET).ssd_dtype == "native"


def test_status_says_what_is_kept_and_why_nothing_is() -> None:
    quiet, asked = Beat(seq=1, progress=0), {"asked_tokens": 40}
    assert cache_state(BOTH, None, None) == "RAM up to 2.0 GiB + disk"
    assert cache_state(CachePlan(0, True, "int8"), ready(), quiet) == "disk as int8"
    assert cache_state(CachePlan(0, False, "native", "cache.enabled is off"), ready(), quiet) == "off: cache.enabled is off"
    why_not = ready(cache=False, cache_off_because="layer 0 uses OddCache")
    assert cache_state(BOTH, why_not, quiet) == "off: layer 0 uses OddCache"
    alone = cache_state(CachePlan(0, True, "native"), ready(one_at_a_time_because="layer 0 uses ChunkedKVCache"), quiet)
    assert alone == "disk; one request at a time: layer 0 uses ChunkedKVCache"
    short = cache_state(CachePlan(0, True, "native"), ready(), Beat(seq=1, progress=9, cache=asked))
    assert short == "disk; idle: no prompt has filled a block of 256 tokens yet"
    full = cache_state(CachePlan(0, True, "native"), ready(), Beat(seq=1, progress=9, cache=asked | {"drop_failed": 7}))
    assert full == "disk; idle: blocks cannot be written (failed 7)"
    assert cache_state(BOTH, ready(), Beat(seq=1, progress=9, hot_bytes=77, cache=asked)) == "RAM up to 2.0 GiB + disk"
