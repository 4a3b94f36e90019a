"""Every cache family restores the state it saved: log-probabilities after a restore are those of the cold run."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cachestore.block import BlockId, Tensor, identify
from cachestore.store import Namespace, Store
from tests.stands.families import FAMILIES, STATEFUL, WINDOW, WINDOWED, family_model
from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache  # noqa: E402

from worker import snapshots  # noqa: E402
from worker.checkpoint import open_checkpoint  # noqa: E402
from worker.hot import HotTier  # noqa: E402
from worker.kv import Layout  # noqa: E402
from worker.kv_leaves import NotCacheable, why_serial  # noqa: E402
from worker.lanes import Chunks, Held, Lane  # noqa: E402
from worker.loader import LoadedModel, load  # noqa: E402
from worker.mlx_types import Cache, CacheLeaf  # noqa: E402
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
        least = 0 if self.loaded.quantizing is None else self.loaded.quantizing.start
        hot = HotTier(64 << 20 if ram else 0)
        cache = PrefixCache(namespace, Layout.of(self.loaded.warm_cache), hot, spill, self.loaded.restored_cache, least)
        self.caches.append(cache)
        return cache

    @property
    def is_serial(self) -> bool:
        return why_serial(self.loaded.warm_cache) is not None

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

    lane = SerialLane(loaded.model, chunks, loaded.quantizing) if bench.is_serial else Lane(loaded.model, 2, chunks)
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
    """The largest, up to the first token that differs: from there on they are two texts. That one differs by no more only
    where it is a near tie.
    """
    alike = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), len(a.ids))
    steps = list(zip(a.logprobs, b.logprobs, strict=True))[: alike + 1]
    return max(mx.abs(x - y).max().item() for x, y in steps)  # pyright: ignore[reportArgumentType]  # floats


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_restored_run_is_the_cold_run_bit_for_bit(bench: Bench, tier: str) -> None:
    cold = run(bench, bench.open(ram=tier == "ram", disk=tier == "disk"), prompt(200))
    cache = bench.caches[0] if tier == "ram" else bench.open(disk=True)
    again = run(bench, cache, prompt(200))
    assert (cold.restored_tokens, again.restored_tokens) == (0, 199 if tier == "ram" else 192)
    assert distance(cold, again) == 0


@pytest.mark.parametrize("bench", WINDOWED, indirect=True)
@pytest.mark.parametrize("length", [17, WINDOW - 2, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 17])
def test_around_the_edge_of_a_window_nothing_is_lost(bench: Bench, length: int) -> None:
    cold = run(bench, bench.open(ram=False, disk=True), prompt(length), 4)
    again = run(bench, bench.open(disk=True), prompt(length), 4)
    assert again.restored_tokens == (length - 1) // 16 * 16
    assert distance(cold, again) == 0


def test_the_next_turn_goes_on_from_the_answer(bench: Bench) -> None:
    cache = bench.open(disk=True)
    first = run(bench, cache, prompt(100), 60)
    longer = [*prompt(100), *first.ids, *prompt(21, seed=6)]
    warm = run(bench, cache, longer)
    assert warm.restored_tokens == 160
    assert distance(warm, run(bench, None, longer)) < ROUNDING
    assert run(bench, bench.open(disk=True), longer).restored_tokens == 176, "its own prompt is on disk"


def test_blocks_longer_than_a_window_serve_too(bench: Bench) -> None:
    chunks = Chunks(idle_tokens=64, busy_tokens=64, block_tokens=64)
    cold = run(bench, bench.open(chunks, ram=False, disk=True), prompt(150), 50, chunks)
    longer = [*prompt(150), *cold.ids, 7]
    again = run(bench, bench.open(chunks, disk=True), longer, chunks=chunks)
    assert again.restored_tokens == 192
    assert distance(again, run(bench, None, longer, chunks=chunks)) < ROUNDING


def test_a_wrong_block_would_change_the_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of a block in turn: without this, the tests here could pass on a model that does not look at its cache."""
    cache = bench.open()
    cold = run(bench, cache, prompt(209))
    find, layout = PrefixCache.find, cache.layout
    for name in (group.name for group in (*layout.row_groups, *layout.state_groups)):

        def swapped(cache: PrefixCache, wanted: BlockId, name: str = name) -> tuple[Mapping[str, Tensor] | None, bool]:
            tensors, is_cold = find(cache, wanted)
            if wanted.start == 12 * 16 and tensors is not None and name in tensors:
                tensors = {**tensors, name: _upside_down(tensors[name])}
            return tensors, is_cold

        monkeypatch.setattr(PrefixCache, "find", swapped)
        warm = run(bench, cache, prompt(209))
        assert warm.restored_tokens == 208
        assert distance(cold, warm) > 10 * ROUNDING, f"{name} does not matter"


def _upside_down(tensor: Tensor) -> Tensor:
    """Another order of the same numbers along the last but one axis, and half as large."""
    values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    return Tensor(tensor.dtype, tensor.shape, (values[..., ::-1, :] * np.float32(0.5)).tobytes())


def files(bench: Bench, *, snapshots: bool) -> list[Path]:
    """In order of writing."""
    bench.close()
    found = [file for file in bench.store.rglob("*.safetensors") if file.stem.endswith("s") == snapshots]
    return sorted(found, key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.parametrize(
    ("bench", "lost"),
    [
        *((family, "a block in the middle") for family in FAMILIES if family != "mamba2"),
        *((family, lost) for family in STATEFUL for lost in ("the last snapshot", "all snapshots")),
    ],
    indirect=["bench"],
)
def test_what_is_lost_is_computed_again(bench: Bench, lost: str) -> None:
    layout = Layout.of(bench.loaded.warm_cache)
    cold = run(bench, bench.open(ram=False, disk=True), prompt(100), 40)
    longer = [*prompt(100), *cold.ids, *prompt(5, seed=7)]
    before = files(bench, snapshots=True), files(bench, snapshots=False)
    match lost:
        case "a block in the middle":
            middle = next(file for file in before[1] if _start(file) == 7 * 16)
            middle.write_bytes(middle.read_bytes()[:-1])
            left = 96 if layout.has_state else 112
        case "the last snapshot":
            before[0][-1].unlink()
            left = 96
        case _:
            for file in before[0]:
                file.write_bytes(b"")
            left = 0
    again = run(bench, bench.open(disk=True), longer)
    assert again.restored_tokens == left
    assert distance(again, run(bench, None, longer)) < ROUNDING
    assert run(bench, bench.open(disk=True), longer).restored_tokens == 144, "and written again"
    assert len(files(bench, snapshots=False)) >= len(before[1])


def _start(file: Path) -> int:
    data = file.read_bytes()
    return identify(data).start


def test_prompts_that_part_share_a_snapshot_from_the_third_on(bench: Bench) -> None:
    """Nobody knows where a shared beginning ends until a second prompt leaves it there."""
    cache = bench.open()
    restored = []
    for seed in (11, 12, 13):
        tokens = [*prompt(100), *prompt(60, seed)]
        answer = run(bench, cache, tokens, 4)
        restored.append(answer.restored_tokens)
        assert distance(answer, run(bench, None, tokens, 4)) < ROUNDING
    if not cache.layout.has_state:
        assert restored == [0, 96, 96]
    elif cache.layout.has_rows:
        assert restored == [0, 0, 96]
    else:
        assert restored == [0, 0, 0], "no rows show where they parted"


def test_a_prefill_given_up_midway_is_continued(bench: Bench) -> None:
    cache = bench.open()
    chain = cache.new_chain("")
    lane = SerialLane(bench.loaded.model, CHUNKS) if bench.is_serial else Lane(bench.loaded.model, 2, CHUNKS)
    lane.insert(prompt(300), 0, bench.loaded.new_cache(), lambda logprobs: mx.argmax(logprobs, axis=-1), [])
    for _ in range(3):
        lane.step()
        for held in lane.held():
            cache.capture(chain, held, prompt(300), 300)
    cache.leave(chain)
    again = run(bench, cache, prompt(300))
    assert again.restored_tokens == 3 * 64
    assert distance(again, run(bench, None, prompt(300))) == 0


@pytest.mark.parametrize("bench", STATEFUL, indirect=True)
def test_recurrent_state_is_kept_as_exactly_as_it_is(bench: Bench) -> None:
    """Also where the model itself computes in fewer bits."""
    layout = Layout.of(bench.loaded.warm_cache)
    cache = bench.open()
    run(bench, cache, prompt(97), 1)
    chain = cache.new_chain("")
    assert cache.look(chain, prompt(97)).usable_blocks == 6
    tensors, _ = cache.find(chain.snapshot(5, prompt(97)))
    assert tensors is not None
    assert {name: tensor.shape for name, tensor in tensors.items()} == {g.name: g.shape for g in layout.state_groups}
    lane = Lane(bench.loaded.model, 2, CHUNKS)
    lane.insert(prompt(97), 0, bench.loaded.new_cache(), lambda logprobs: mx.argmax(logprobs, axis=-1), [])
    lane.step()
    lane.step()
    (held,) = lane.held()
    assert held.tokens == 96
    live = layout.copy_state(held)
    assert live is not None
    assert {name: bytes(t.data) for name, t in live.tensors().items()} == {n: bytes(t.data) for n, t in tensors.items()}


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_models_in_bfloat16_restore_bit_for_bit(tmp_path: Path, family: str) -> None:
    path = family_model(tmp_path / family, family)
    weights = cast("dict[str, mx.array]", mx.load(str(path / "model.safetensors")))
    halved = {name: array if name.endswith("A_log") else array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.eval(halved)
    mx.save_safetensors(str(path / "model.safetensors"), halved)
    bench = Bench(family, load(open_checkpoint(path), lambda *_: None), tmp_path / "store")
    cold = run(bench, bench.open(ram=False, disk=True), prompt(200))
    again = run(bench, bench.open(disk=True), prompt(200))
    bench.close()
    layout = Layout.of(bench.loaded.warm_cache)
    assert {group.dtype for group in layout.row_groups} == {mx.bfloat16}
    assert not layout.has_state or mx.float32 in {group.dtype for group in layout.state_groups}
    assert again.restored_tokens == 192
    assert distance(cold, again) == 0


def test_quantized_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    """Models may bring such caches of their own; mlx_lm cannot batch them."""
    plain = load(open_checkpoint(family_model(tmp_path / "llama", "llama", head_dim=64)), lambda *_: None)

    def new_cache() -> Cache:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in plain.warm_cache]

    warm_cache = new_cache()
    mx.eval(plain.model(mx.zeros((1, 8), dtype=mx.int32), cache=warm_cache))
    bench = Bench("llama", replace(plain, new_cache=new_cache, warm_cache=warm_cache), tmp_path / "store")
    assert bench.is_serial
    cold = run(bench, bench.open(disk=True, ram=False), prompt(200), 40)
    again = run(bench, bench.open(disk=True), prompt(200), 40)
    turn = run(bench, bench.open(disk=True), [*prompt(200), *cold.ids, 5], 4)
    bench.close()
    assert (again.restored_tokens, turn.restored_tokens) == (192, 240)
    assert distance(cold, again) == 0
    assert bench.open().layout.parts() != Layout.of(plain.warm_cache).parts()


def test_layouts_that_differ_never_share_a_name() -> None:
    """Windows, array counts and paths are part of it, though the shapes of a short warm-up are the same."""
    rows = mx.zeros((1, 2, 8, 16))

    def filled(leaf: KVCache | RotatingKVCache) -> CacheLeaf:
        leaf.update_and_fetch(rows, rows)
        return leaf

    def state(size: int) -> CacheLeaf:
        leaf = ArraysCache(size)
        leaf[0] = mx.zeros((1, 3, 4))
        return leaf

    caches = [
        [filled(KVCache())],
        [filled(KVCache()), filled(KVCache())],
        [CacheList(filled(KVCache()), filled(KVCache()))],
        [filled(RotatingKVCache(32))],
        [filled(RotatingKVCache(64))],
        [state(1)],
        [state(2)],
    ]
    parts = [tuple(Layout.of(cache).parts()) for cache in caches]
    assert len(set(parts)) == len(parts)


def test_a_cache_that_cannot_be_put_back_is_refused_with_the_reason() -> None:
    leaf = RotatingKVCache(32, keep=4)
    leaf.update_and_fetch(mx.zeros((1, 2, 8, 16)), mx.zeros((1, 2, 8, 16)))
    with pytest.raises(NotCacheable, match="first 4 tokens"):
        Layout.of([leaf])
    with pytest.raises(NotCacheable, match="empty"):
        Layout.of([KVCache()])
    with pytest.raises(NotCacheable, match="empty"):
        Layout.of([ArraysCache(2)])
    with pytest.raises(NotCacheable, match=r"layer 0 uses .*Strange"):
        Layout.of([Strange()])  # pyright: ignore[reportArgumentType]


class Strange:
    nbytes = 0
    state = None


def test_state_that_is_not_what_the_warm_up_saw_is_not_kept() -> None:
    """An array that comes up later would be lost in a restore."""
    leaf = ArraysCache(2)
    leaf[0] = mx.zeros((1, 3, 4))
    layout = Layout.of([leaf])
    assert layout.copy_state(Held(1, 16, [leaf], 0)) is not None
    leaf[1] = mx.zeros((1, 3, 4))
    assert layout.copy_state(Held(1, 16, [leaf], 0)) is None
    leaf[1], leaf[0] = None, mx.zeros((1, 2, 4))
    assert layout.copy_state(Held(1, 16, [leaf], 0)) is None


@pytest.mark.parametrize("bench", ["qwen3_5", "mamba2"], indirect=True)
def test_snapshots_are_sparse(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the prompt, every so often, and where the answer ended; not at every block of either."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVERY_TOKENS", 128)
    run(bench, bench.open(disk=True), prompt(300), 100)
    kept = [_start(file) + 16 for file in files(bench, snapshots=True)]
    assert kept == [128, 256, 288, 384, 400]


@pytest.mark.parametrize("bench", ["qwen3_5"], indirect=True)
def test_a_prompt_that_parts_early_goes_on_from_a_snapshot_on_the_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVERY_TOKENS", 128)
    cache = bench.open()
    run(bench, cache, prompt(300), 4)
    other = [*prompt(200), *prompt(50, seed=9)]
    answer = run(bench, cache, other, 4)
    assert answer.restored_tokens == 128
    assert distance(answer, run(bench, None, other, 4)) < ROUNDING


@pytest.mark.parametrize(("bench", "kernel"), [("qwen3_5", "gated_delta"), ("mamba2", "ssm")], indirect=["bench"])
def test_the_fingerprint_covers_the_code_that_other_files_hold(bench: Bench, kernel: str) -> None:
    names = {Path(file).stem for file in bench.loaded.source_files}
    assert {bench.family, kernel, "cache", "base"} <= names


def test_recurrent_state_is_part_of_what_a_sequence_costs(bench: Bench) -> None:
    state_bytes = sum(
        array.nbytes
        for leaf in bench.loaded.warm_cache
        for part in (leaf.caches if isinstance(leaf, CacheList) else [leaf])
        if isinstance(part, ArraysCache)
        for array in part.cache
        if array is not None
    )
    assert (state_bytes > 0) is (bench.family in STATEFUL)
    assert bench.loaded.kv_cost.state_bytes == state_bytes
    assert bench.loaded.kv_cost.bytes(0) == state_bytes
