"""A new worker reads what was used last back into RAM, while nobody waits, and within its share."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from cachestore.block import Block, BlockId
from cachestore.store import Store
from supervisor.protocol import CacheGrant, ModelRef
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import ForcedText, RunningEngine
from worker.engine import Engine
from worker.job import LoadSpec

BLOCK = 16
BLOCK_BYTES = 512 * BLOCK + 4 * BLOCK
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


class Warming(RunningEngine):
    def __init__(self, model: Path, store: Path, hot_bytes: int = 64 * MIB, *, warm_start: bool = True) -> None:
        super().__init__(model, text=ForcedText())
        cache = CacheGrant(dir=str(store), hot_bytes=hot_bytes, block=BLOCK)
        ref = ModelRef(id="tiny", path=str(model), context=0)
        self.engine = Engine(LoadSpec(ref, cache=cache, settings={"warm_start": warm_start}), ForcedText(), self.sink)

    def wait_until_warm(self, hot_bytes: int) -> None:
        until = time.monotonic() + patient_s(10)
        while self.engine.beat().hot_bytes < hot_bytes:
            assert time.monotonic() < until, self.engine.beat()
            time.sleep(0.01)


def test_a_new_worker_has_the_last_conversations_in_ram_and_the_answer_is_the_same(model: Path, tmp_path: Path) -> None:
    with Warming(model, tmp_path / "store") as e:
        cold = e.ask("cold", prompt(300), 24)
    with Warming(model, tmp_path / "store") as e:
        e.wait_until_warm(20 * BLOCK_BYTES)
        warm = e.ask("warm", prompt(300), 24)
        assert e.engine.beat().cache["cold_hits"] == 0, "reading ahead counts as nobody's hit"
    assert warm.usage is not None
    assert (warm.usage.cached_hot, warm.usage.cached_cold) == (288, 0)
    assert warm.ids == cold.ids


def test_it_can_be_turned_off(model: Path, tmp_path: Path) -> None:
    with Warming(model, tmp_path / "store") as e:
        e.ask("cold", prompt(300), 4)
    with Warming(model, tmp_path / "store", warm_start=False) as e:
        time.sleep(0.3)
        answer = e.ask("a", prompt(300), 4)
    assert answer.usage is not None and answer.usage.cached_hot == 0


def test_half_of_the_ram_tier_at_most_goes_to_what_was_used_last(model: Path, tmp_path: Path) -> None:
    with Warming(model, tmp_path / "store") as e:
        for seed in range(1, 5):
            e.ask(f"r{seed}", prompt(160, seed), 1)
    with Warming(model, tmp_path / "store", hot_bytes=24 * BLOCK_BYTES) as e:
        e.wait_until_warm(11 * BLOCK_BYTES)
        time.sleep(0.2)
        assert e.engine.beat().hot_bytes <= 12 * BLOCK_BYTES
        newest = e.ask("newest", prompt(160, 4), 1)
        assert newest.usage is not None and newest.usage.cached_hot == 144


def test_requests_are_not_held_up_and_reading_stands_still_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Warming(model, tmp_path / "store") as e:
        e.ask("cold", prompt(1500), 1)
    reads: list[float] = []
    get = Store.get

    def slow(store: Store, wanted: BlockId) -> object:
        if threading.current_thread().name == "warm-start":
            reads.append(time.monotonic())
            time.sleep(0.05)
        return get(store, wanted)

    monkeypatch.setattr(Store, "get", slow)
    with Warming(model, tmp_path / "store") as e:
        while not reads:
            time.sleep(0.005)
        stream = e.submit("stream", prompt(5, 9), 1200)
        read: list[int] = []
        """How many there were, again and again while the stream ran."""
        while not stream.over.is_set():
            so_far, runs = len(reads), bool(stream.rows)
            if runs and not stream.over.is_set():
                read.append(so_far)
            time.sleep(0.001)
        first = min(step.timings.first_token_s for step in stream.rows if step.timings)
    assert first < patient_s(1.0)
    assert read and read[-1] - read[0] <= 1, "one read may have been under way"


def test_a_store_that_breaks_under_it_leaves_a_worker_that_serves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Warming(model, tmp_path / "store") as e:
        cold = e.ask("cold", prompt(300), 4)
    tried = threading.Event()

    def broken(store: Store, wanted: BlockId) -> object:
        tried.set()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("worker.warm_start.Store.get", broken)
        with Warming(model, tmp_path / "store") as e:
            assert tried.wait(10)
            patch.undo()
            assert e.ask("a", prompt(300), 4).ids == cold.ids


def test_what_arrives_after_memory_was_trimmed_is_not_taken(model: Path, tmp_path: Path) -> None:
    from worker.mailbox import Warmed

    with Warming(model, tmp_path / "store") as e:
        e.ask("cold", prompt(100), 1)
        e.engine.trim("hard", 0)
        e.engine._mailbox.put(Warmed([Block(BlockId("k", b"", 0, (1,)), {})]))
        e.settle()
        time.sleep(0.1)
        assert e.engine.beat().hot_bytes == 0
