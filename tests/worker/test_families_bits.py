"""Every cache family restores the state it saved: log-probabilities after a restore are those of the cold run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachestore.store import Namespace, Store
from tests.stands.families import FAMILIES, WINDOW, family_model
from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from worker.checkpoint import open_checkpoint  # noqa: E402
from worker.hot import HotTier  # noqa: E402
from worker.kv import Layout  # noqa: E402
from worker.kv_leaves import why_serial  # noqa: E402
from worker.lanes import Chunks, Lane  # noqa: E402
from worker.loader import LoadedModel, load  # noqa: E402
from worker.prefix import PrefixCache  # noqa: E402
from worker.restore import Restore  # noqa: E402
from worker.serial_lane import SerialLane  # noqa: E402
from worker.spill import Spill  # noqa: E402

CHUNKS = Chunks(idle_tokens=64, busy_tokens=16, block_tokens=16)
ROUNDING = 1e-4
"""What other chunk edges may change in a log-probability."""


def prompt(length: int, seed: int = 5) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


@dataclass
class Bench:
    """One family's model and the tiers of its cache."""

    family: str
    loaded: LoadedModel
    store: Path
    caches: list[PrefixCache] = field(default_factory=list)

    def open(self, chunks: Chunks = CHUNKS, *, ram: bool = True, disk: bool = False) -> PrefixCache:
        """A cache as a new process would open it; what was written so far is on disk."""
        self.close()
        namespace = Namespace(self.family, "f" * 64, f"{chunks.block_tokens:064}", chunks.block_tokens)
        spill = Spill(Store(self.store, namespace), None) if disk else None
        hot = HotTier(64 << 20 if ram else 0)
        cache = PrefixCache(namespace, Layout.of(self.loaded.warm_cache), hot, spill, self.loaded.new_cache)
        self.caches.append(cache)
        return cache

    def close(self) -> None:
        for cache in self.caches:
            if cache.spill is not None:
                cache.spill.close(10.0)
        self.caches.clear()


@dataclass
class Run:
    restored_tokens: int
    ids: list[int]
    logprobs: list[mx.array]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    return {}


@pytest.fixture(params=FAMILIES)
def bench(
    request: pytest.FixtureRequest, models: dict[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> Iterator[Bench]:
    family = request.param
    if family not in models:
        path = family_model(tmp_path_factory.mktemp("models") / family, family)
        models[family] = load(open_checkpoint(path), lambda *_: None)
    opened = Bench(family, models[family], tmp_path / "store")
    yield opened
    opened.close()


def run(bench: Bench, cache: PrefixCache | None, tokens: list[int], steps: int = 8, chunks: Chunks = CHUNKS) -> Run:
    """A greedy answer of `steps` tokens, alone in its lane."""
    loaded, seen, ids = bench.loaded, list[mx.array](), list(tokens)

    def greedy(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    lane = Lane(loaded.model, 2, chunks) if why_serial(loaded.warm_cache) is None else SerialLane(loaded.model, chunks)
    chain = None if cache is None else cache.new_chain("")
    restored = None if cache is None or chain is None else Restore(cache, chain, tokens).advance(float("inf"))
    known = 0 if restored is None else restored.tokens
    filled = None if restored is None else restored.cache
    edge = 0 if chain is None else chain.branch_tokens
    lane.insert(tokens, known, filled or loaded.new_cache(), greedy, [], edge)
    while len(ids) < len(tokens) + steps:
        ids += [token for _, token in lane.step()]
        for held in lane.held():
            if cache is not None and chain is not None:
                cache.capture(chain, held, ids, len(tokens))
    if cache is not None and chain is not None:
        cache.leave(chain)
    lane.close()
    mx.eval(seen)
    return Run(known, ids[len(tokens) :], seen[:steps])


def distance(a: Run, b: Run) -> float:
    return max(mx.abs(x - y).max().item() for x, y in zip(a.logprobs, b.logprobs, strict=True))


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_restored_run_is_the_cold_run_bit_for_bit(bench: Bench, tier: str) -> None:
    cold = run(bench, bench.open(ram=tier == "ram", disk=tier == "disk"), prompt(200))
    cache = bench.caches[0] if tier == "ram" else bench.open(disk=True)
    again = run(bench, cache, prompt(200))
    assert (cold.restored_tokens, again.restored_tokens) == (0, 199 if tier == "ram" else 192)
    assert distance(cold, again) == 0


@pytest.mark.parametrize("length", [17, WINDOW - 2, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 17])
def test_around_the_edge_of_a_window_nothing_is_lost(bench: Bench, length: int) -> None:
    cold = run(bench, bench.open(ram=False, disk=True), prompt(length), 4)
    again = run(bench, bench.open(disk=True), prompt(length), 4)
    assert again.restored_tokens == (length - 1) // 16 * 16
    assert distance(cold, again) == 0
