"""Chains as long as a large context, and stores with very many files: linear cost, few descriptors, nobody waits."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from cachestore.block import Block, BlockId, Tensor, decode, identify
from cachestore.keys import block_key, chain, namespace_root
from cachestore.store import Namespace, Store
from supervisor.protocol import CacheGrant, ModelRef
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import ForcedText, RunningEngine
from worker.chain import Chain
from worker.engine import Engine
from worker.job import LoadSpec

LONG = 131_072
BLOCK = 64
FILES = 50_000
HOT_BYTES = 256 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2 * LONG)


def tokens(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


def running(model: Path, store: Path, hot_bytes: int = HOT_BYTES, *, warm_start: bool = False) -> RunningEngine:
    e = RunningEngine(model, text=ForcedText(context=2 * LONG))
    cache = CacheGrant(dir=str(store), hot_bytes=hot_bytes, block=BLOCK)
    ref = ModelRef(id="tiny", path=str(model), context=0)
    e.engine = Engine(LoadSpec(ref, cache=cache, settings={"warm_start": warm_start}), ForcedText(context=2 * LONG), e.sink)
    return e


@pytest.fixture(scope="module")
def full(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the blocks of a 131,072-token prompt. Their numbers are made up, their names and shapes are right."""
    root = tmp_path_factory.mktemp("long") / "store"
    with running(model, root) as e:
        e.ask("shape", tokens(BLOCK + 1, seed=99), 1)
        info = e.sink.info
        e.engine.stop(10.0)
    assert info is not None and info.cache_namespace and info.cache_layout
    (file,) = root.rglob("*.safetensors")
    data = file.read_bytes()
    shapes = decode(data, identify(data))
    store = Store(root, Namespace("tiny", info.cache_namespace, info.cache_layout, BLOCK))
    first = namespace_root("text", info.cache_namespace, info.cache_layout)
    prompt = tokens(LONG)
    hashes = chain(first, prompt, BLOCK)
    for index, (parent, own) in enumerate(zip([first, *hashes], hashes, strict=False)):
        start = index * BLOCK
        block_id = BlockId(block_key(own), parent, start, tuple(prompt[start : start + BLOCK]))
        tensors = {name: Tensor(t.dtype, t.shape, bytes(t.nbytes)) for name, t in shapes.items()}
        assert store.put(Block(block_id, tensors))
    return root


def test_hashing_is_linear() -> None:
    def seconds(length: int) -> float:
        prompt = tokens(length)
        began = time.thread_time()
        Chain(b"r" * 32, BLOCK).grow(prompt, length)
        return time.thread_time() - began

    short, long = (min(seconds(length) for _ in range(3)) for length in (LONG // 4, LONG))
    assert long < 8 * short + 0.05
    assert long < 2.0


@pytest.mark.parametrize("hot_bytes", [HOT_BYTES, 8 << 20, 0], ids=["RAM for all", "RAM for an eighth", "no RAM tier"])
def test_a_chain_of_131072_tokens_is_restored_at_linear_cost_with_few_descriptors(
    model: Path, full: Path, hot_bytes: int
) -> None:
    most, over = [0], threading.Event()
    with running(model, full, hot_bytes) as e:
        before = psutil.Process().num_fds()

        def watch() -> None:
            while not over.wait(0.005):
                most[0] = max(most[0], psutil.Process().num_fds())

        threading.Thread(target=watch, daemon=True).start()
        prompt = tokens(LONG)
        e.ask("warm-up", prompt[: BLOCK * 16 + 3], 1)
        quarter = e.ask("quarter", [*prompt[: LONG // 4], 5], 1)
        whole = e.ask("whole", [*prompt, 5], 1)
        over.set()
    assert whole.usage is not None and whole.timings is not None and quarter.timings is not None
    assert whole.cached == LONG
    assert most[0] <= before + 4
    assert whole.timings.restore_s < 8 * quarter.timings.restore_s + patient_s(0.5)


def test_fifty_thousand_files_are_listed_while_requests_are_served(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with running(model, root) as e:
        e.ask("first", tokens(300), 1)
        e.engine.stop(10.0)
    (namespace,) = {file.parent.parent for file in root.rglob("*.safetensors")}
    for number in range(FILES):
        name = f"{number % 256:02x}{number:062x}"
        directory = namespace / name[:2]
        if number < 256:
            directory.mkdir(exist_ok=True)
        (directory / f"{name}.safetensors").touch()
    with running(model, root, warm_start=True) as e:
        answers = [e.ask(f"r{number}", tokens(40, seed=number), 2) for number in range(20)]
        slowest = max(answer.timings.first_token_s for answer in answers if answer.timings)
        assert slowest < patient_s(0.5), "a request waited for the listing"
        until = time.monotonic() + patient_s(30)
        while e.engine.beat().hot_bytes < 4 * BLOCK * 512 or any(t.name == "warm-start" for t in threading.enumerate()):
            assert time.monotonic() < until, "the blocks among the many files were not read ahead"
            time.sleep(0.02)
