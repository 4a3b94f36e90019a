"""Restored state is the state that was saved, bit for bit: log-probabilities after a restore do not differ in one bit."""

import random
from pathlib import Path

import pytest

from cachestore.store import Namespace, Store
from tests.stands.models import tiny_model
from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from worker.checkpoint import open_checkpoint  # noqa: E402
from worker.hot import HotTier  # noqa: E402
from worker.kv import Layout  # noqa: E402
from worker.lanes import Chunks, Lane, segments_of  # noqa: E402
from worker.loader import LoadedModel, load  # noqa: E402
from worker.prefix import PrefixCache  # noqa: E402
from worker.restore import Restore  # noqa: E402
from worker.sampling import greedy  # noqa: E402
from worker.spill import Spill  # noqa: E402

PROMPT = random.Random(5).choices(range(10, 400), k=300)
CHUNKS = Chunks(idle_tokens=64, busy_tokens=16, block_tokens=16)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    path = tiny_model(tmp_path / "tiny")
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    converted = {name: array.astype(getattr(mx, request.param)) for name, array in weights.items()}
    mx.eval(converted)
    mx.save_safetensors(str(path / "model.safetensors"), converted)
    return load(open_checkpoint(path), lambda *_: None)


def open_cache(loaded: LoadedModel, store: Path | None) -> PrefixCache:
    namespace = Namespace("tiny", "f" * 64, "e" * 64, CHUNKS.block_tokens)
    spill = None if store is None else Spill(Store(store, namespace), None)
    return PrefixCache(namespace, Layout.of(loaded.warm_cache), HotTier(64 << 20), spill, loaded.new_cache)


def run(loaded: LoadedModel, cache: PrefixCache, steps: int = 20, prompt: list[int] = PROMPT) -> tuple[int, list[mx.array]]:
    """Tokens restored, and the log-probabilities of each step of a greedy answer."""
    lane = Lane(loaded.model, 2, CHUNKS)
    chain = cache.new_chain("")
    restored = Restore(cache, chain, prompt).advance(float("inf"))
    assert restored is not None
    seen, tokens = list[mx.array](), list(prompt)

    def recorded(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return greedy(logprobs)

    lane.insert(prompt, restored.tokens, restored.cache or loaded.new_cache(), recorded, [])
    while len(seen) < steps:
        tokens += [token for _, token in lane.step()]
        for held in lane.held():
            cache.capture(chain, held, tokens, len(prompt))
    mx.eval(seen)
    return restored.tokens, seen


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_restored_run_is_the_cold_run_bit_for_bit(loaded: LoadedModel, tmp_path: Path, tier: str) -> None:
    store = None if tier == "ram" else tmp_path / "store"
    cache = open_cache(loaded, store)
    nothing, cold = run(loaded, cache)
    if cache.spill is not None:
        cache.spill.close(10.0)
        cache = open_cache(loaded, store)
    restored, again = run(loaded, cache)
    assert (nothing, restored) == (0, 299 if tier == "ram" else 288)
    assert max(mx.abs(a - b).max().item() for a, b in zip(cold, again, strict=True)) == 0  # pyright: ignore[reportArgumentType]  # floats


def test_a_restored_run_is_cut_where_the_cold_one_was() -> None:
    for length in range(2, 300, 7):
        prompt = list(range(length))
        cold = segments_of(prompt, 0, CHUNKS)
        assert [token for segment in cold for token in segment] == prompt
        assert len(cold[-1]) == 1
        edges = {segment[-1] + 1 for segment in cold}
        for start in {0, 64 * (length // 70), (length - 1) // 16 * 16, length - 1}:
            again = segments_of(prompt, start, CHUNKS)
            assert [token for segment in again for token in segment] == prompt[start:]
            assert {segment[-1] + 1 for segment in again} <= edges


def test_a_block_takes_no_more_room_than_its_rows(loaded: LoadedModel, tmp_path: Path) -> None:
    cache = open_cache(loaded, None)
    run(loaded, cache, 2)
    tokens = 288 + 11  # full blocks and the tail
    assert cache.hot.bytes == tokens * (loaded.kv_bytes_per_token + 4)
    assert len(cache.layout.row_groups) == 1


def test_a_restored_prefix_is_not_copied_on_its_way_into_the_batch(loaded: LoadedModel) -> None:
    """Bytes held at most while it is restored, prefilled and decoded on, beside those of its rows and the room they have."""
    prompt = random.Random(6).choices(range(10, 400), k=1800)
    cache = open_cache(loaded, None)
    run(loaded, cache, 2, prompt)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    restored, _ = run(loaded, cache, 2, prompt)
    assert restored == 1799
    roomy_bytes = 2048 * loaded.kv_bytes_per_token
    assert mx.get_peak_memory() - before < 1.5 * roomy_bytes
