"""The prefix cache seen from an engine: what is found again, that no answer changes by it, what happens to bad blocks."""

import random
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachestore.block import BlockId, Tensor
from supervisor.protocol import CacheGrant, Sampling
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.sink import Answer, ForcedText, Gate, RunningEngine
from worker.prefix import PrefixCache

BLOCK = 16
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


def running(model: Path, store: Path | None, hot_bytes: int = 64 * MIB, *, block: int = BLOCK) -> RunningEngine:
    directory = None if store is None else str(store)
    return RunningEngine(model, cache=CacheGrant(dir=directory, hot_bytes=hot_bytes, block=block), text=ForcedText())


def blocks_in(store: Path) -> list[Path]:
    return sorted(store.rglob("*.safetensors"))


@pytest.mark.parametrize("length", [17, 64, 65, 81, 700])
def test_a_new_process_restores_from_disk_and_answers_bit_for_bit(model: Path, tmp_path: Path, length: int) -> None:
    with running(model, tmp_path / "store") as e:
        cold = e.ask("cold", prompt(length), 24)
    with running(model, tmp_path / "store") as e:
        restored = e.ask("restored", prompt(length), 24)
    assert restored.ids == cold.ids
    assert cold.cached == 0
    assert restored.usage is not None
    assert (restored.usage.cached_hot, restored.usage.cached_cold) == (0, (length - 1) // BLOCK * BLOCK)
    assert restored.accepted == (0, restored.usage.cached_cold, 0)
    assert_same_greedy(model, prompt(length), greedy_ids(model, prompt(length), 24), cold.ids)


def test_an_immediate_repeat_computes_one_token(model: Path) -> None:
    with running(model, None) as e:
        cold = e.ask("cold", prompt(300), 24)
        warm = e.ask("warm", prompt(300), 24)
    assert warm.ids == cold.ids
    assert warm.usage is not None
    assert (warm.usage.cached_hot, warm.usage.cached_cold) == (299, 0)


def test_the_next_turn_finds_the_answer_of_the_last_one(model: Path) -> None:
    with running(model, None) as e:
        first = e.ask("first", prompt(100), 60)
        longer = [*prompt(100), *first.ids, *prompt(30, seed=2)]
        second = e.ask("second", longer, 24)
    assert second.cached == 160 // BLOCK * BLOCK
    assert_same_greedy(model, longer, greedy_ids(model, longer, 24), second.ids)


def test_requests_at_once_share_a_prefix_that_none_had_before(model: Path) -> None:
    prompts = [[*prompt(320), *prompt(9, seed)] for seed in range(10, 14)]
    with running(model, None) as e:
        answers = [e.submit(f"r{i}", p, 12) for i, p in enumerate(prompts)]
        assert all(answer.over.wait(30) for answer in answers)
    assert [answer.cached for answer in answers] == [0, 320, 320, 320]
    for p, answer in zip(prompts, answers, strict=True):
        assert_same_greedy(model, p, greedy_ids(model, p, 12), answer.ids)


def test_sequences_in_one_batch_are_captured_without_each_others_rows(model: Path, tmp_path: Path) -> None:
    lengths = (40, 333, 90)
    with running(model, tmp_path / "store") as e:
        with e.at_once():
            first = [e.submit(f"a{n}", prompt(n, n), 70) for n in lengths]
        assert all(answer.over.wait(30) for answer in first)
    assert any(len(step) == 3 for step in e.sink.steps), "nothing was batched"
    with running(model, tmp_path / "store") as e:
        for n, earlier in zip(lengths, first, strict=True):
            longer = [*prompt(n, n), *earlier.ids, 5]
            later = e.ask(f"b{n}", longer, 16)
            assert later.cached == (n + 70) // BLOCK * BLOCK
            assert_same_greedy(model, longer, greedy_ids(model, longer, 16), later.ids)


def test_another_salt_finds_nothing(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "store") as e:
        mine = e.ask("a", prompt(200), 4, salt="alice")
        theirs = e.ask("b", prompt(200), 4, salt="bob")
        again = e.ask("c", prompt(200), 4, salt="alice")
    assert (mine.cached, theirs.cached, again.cached) == (0, 0, 199)


def test_penalties_see_a_restored_prefix(model: Path) -> None:
    penalized = Sampling(temperature=0.0, repetition_penalty=1.9, frequency_penalty=0.7)
    tokens = [*prompt(300), *prompt(8, seed=3) * 2]
    with running(model, None) as e:
        cold = e.ask("cold", tokens, 24, penalized)
        warm = e.ask("warm", tokens, 24, penalized)
        plain = e.ask("plain", tokens, 24)
    assert warm.cached > 0
    assert warm.ids == cold.ids
    assert plain.ids != cold.ids


def test_a_wrong_block_would_change_the_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the tests above could pass on a model that does not care what is in its cache."""
    find = PrefixCache.find

    def swapped(cache: PrefixCache, wanted: BlockId) -> tuple[Mapping[str, Tensor] | None, bool]:
        tensors, is_cold = find(cache, wanted)
        if wanted.start == 10 * BLOCK and tensors is not None:
            tensors = {name: Tensor(t.dtype, t.shape, bytes(t.data)[::-1][: t.nbytes]) for name, t in tensors.items()}
            tensors = {name: _finite(t) for name, t in tensors.items()}
        return tensors, is_cold

    with running(model, None) as e:
        cold = e.ask("cold", prompt(300), 24)
        monkeypatch.setattr(PrefixCache, "find", swapped)
        warm = e.ask("warm", prompt(300), 24)
    assert warm.cached == 299
    assert warm.ids != cold.ids


def _finite(tensor: Tensor) -> Tensor:
    import numpy as np

    values = np.nan_to_num(np.frombuffer(tensor.data, np.float32), nan=0.5, posinf=1.0, neginf=-1.0).clip(-3, 3)
    return Tensor(tensor.dtype, tensor.shape, values.astype(np.float32).tobytes())


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing", "another block"])
def test_a_damaged_block_is_a_miss_and_the_answer_stays(model: Path, tmp_path: Path, damage: str) -> None:
    store = tmp_path / "store"
    with running(model, store) as e:
        cold = e.ask("cold", prompt(300), 24)
    before = len(blocks_in(store))
    for file in blocks_in(store)[::2]:
        data = bytearray(file.read_bytes())
        match damage:
            case "flip":
                data[-100] ^= 1
                file.write_bytes(data)
            case "cut":
                file.write_bytes(data[: len(data) // 2])
            case "empty":
                file.write_bytes(b"")
            case "missing":
                file.unlink()
            case _:
                shutil.copyfile(blocks_in(store)[1], file)
    with running(model, store) as e:
        answer = e.ask("again", prompt(300), 24)
        assert answer.cached < 288
        assert_same_greedy(model, prompt(300), cold.ids, answer.ids)
        e.engine.stop(10.0)
    assert len(blocks_in(store)) >= before - 1, "what was damaged is written again"
    with running(model, store) as e:
        assert e.ask("third", prompt(300), 24).cached == 288


def test_a_cancelled_prefill_keeps_its_blocks_and_the_repeat_starts_further_along(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(2000), 5)
        gate.let(3)
        e.engine.cancel("first")
        gate.open()
        assert first.over.wait(20)
        second = e.ask("second", prompt(2000), 5)
    assert first.finish == "cancelled"
    assert second.cached == 3 * 256
    assert_same_greedy(model, prompt(2000), greedy_ids(model, prompt(2000), 5), second.ids)


def test_ram_smaller_than_the_prompt_keeps_its_beginning(model: Path) -> None:
    block_bytes = 512 * BLOCK + 4 * BLOCK
    with running(model, None, hot_bytes=10 * block_bytes) as e:
        e.ask("a", prompt(400), 4)
        again = e.ask("b", prompt(400), 4)
        assert e.engine.beat().hot_bytes <= 10 * block_bytes
    assert again.cached == 10 * BLOCK


def test_what_an_earlier_prompt_loses_first_is_its_end(model: Path) -> None:
    block_bytes = 512 * BLOCK + 4 * BLOCK
    with running(model, None, hot_bytes=18 * block_bytes) as e:
        e.ask("a", prompt(10 * BLOCK + 1), 1)
        e.ask("b", prompt(12 * BLOCK + 1, seed=2), 1)
        again = e.ask("c", prompt(10 * BLOCK + 1), 1)
    assert again.cached == 6 * BLOCK


def test_disk_alone_serves_an_immediate_repeat_from_the_write_queue(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "store", hot_bytes=0) as e:
        cold = e.ask("a", prompt(400), 12)
        again = e.ask("b", prompt(400), 12)
    assert again.cached == 399 // BLOCK * BLOCK
    assert again.ids == cold.ids


def test_a_store_that_cannot_be_used_costs_nothing_but_the_hits(model: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "store"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("not ours")
    with running(model, foreign) as e:
        cold = e.ask("a", prompt(200), 12)
        assert e.ask("b", prompt(200), 12).ids == cold.ids
    assert [file.name for file in foreign.iterdir()] == ["precious.txt"]


def test_without_ram_and_disk_the_cache_is_off_and_says_so(model: Path) -> None:
    with running(model, None, hot_bytes=0) as e:
        e.ask("a", prompt(200), 4)
        assert e.ask("b", prompt(200), 4).cached == 0
        assert e.sink.info is not None
        assert e.sink.info.capabilities["cache_off_because"] == "turned off"
        assert e.sink.info.cache_namespace is None


def test_other_weights_under_the_same_name_find_nothing(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "store") as e:
        e.ask("a", prompt(200), 4)
    other = tiny_model(tmp_path / "tiny", num_hidden_layers=3)
    with running(other, tmp_path / "store") as e:
        answer = e.ask("b", prompt(200), 4)
    assert answer.cached == 0
    assert_same_greedy(other, prompt(200), greedy_ids(other, prompt(200), 4), answer.ids)


def test_another_block_size_finds_nothing_and_breaks_nothing(model: Path, tmp_path: Path) -> None:
    answers: list[Answer] = []
    for block in (16, 32, 16):
        with running(model, tmp_path / "store", block=block) as e:
            answers.append(e.ask("a", prompt(200), 12))
    assert [answer.cached for answer in answers] == [0, 0, 192]
    assert answers[0].ids == answers[2].ids


def test_trimming_gives_the_ram_back_and_a_grant_moves_the_limit(model: Path) -> None:
    from supervisor.protocol import Grant

    with running(model, None) as e:
        e.ask("a", prompt(400), 4)
        e.engine.trim("hard", 0)
        assert e.ask("b", prompt(400), 4).cached == 0
        e.engine.grant(Grant(hot_bytes=0))
        assert e.ask("c", prompt(400), 4).cached == 0
        e.settle()
        assert e.engine.beat().hot_bytes == 0


def test_write_credit_is_not_overdrawn(model: Path, tmp_path: Path) -> None:
    credit = 100_000
    grant = CacheGrant(dir=str(tmp_path / "store"), hot_bytes=0, block=BLOCK, write_credit=credit)
    with RunningEngine(model, cache=grant, text=ForcedText()) as e:
        e.ask("a", prompt(400), 4)
        e.engine.stop(10.0)
        assert e.engine.beat().cache["drop_credit"] > 0
    written = [file.stat() for file in blocks_in(tmp_path / "store")]
    assert credit / 3 < sum(max(file.st_size, file.st_blocks * 512) for file in written) <= credit


def test_restoring_a_long_prefix_does_not_stop_a_stream(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kv_assembly import Assembly

    with running(model, tmp_path / "store") as e:
        e.ask("cold", prompt(1500), 2)
    add = Assembly.add

    def slow(assembly: Assembly, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        time.sleep(0.01)
        return add(assembly, tensors, tokens)

    monkeypatch.setattr(Assembly, "add", slow)
    with running(model, tmp_path / "store") as e:
        stream = e.submit("stream", prompt(5), 10_000)
        while not stream.rows:
            time.sleep(0.001)
        restored = e.submit("restored", prompt(1500), 1)
        assert restored.over.wait(30)
        e.engine.cancel("stream")
    assert restored.cached == 1488
    first = next(i for i, step in enumerate(e.sink.steps) if any(row.rid == "restored" for row in step))
    # 93 blocks at 10 ms each in slices of 50 ms: the stream gets its step between them.
    assert sum(any(row.rid == "stream" for row in step) for step in e.sink.steps[:first]) >= 15


def test_a_restore_can_be_cancelled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kv_assembly import Assembly

    add, begun, added = Assembly.add, threading.Event(), list[int]()

    def slow(assembly: Assembly, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        begun.set()
        added.append(tokens)
        time.sleep(0.02 if len(added) < 10 else 1.0)
        return add(assembly, tensors, tokens)

    with running(model, None) as e:
        e.ask("cold", prompt(1500), 2)
        monkeypatch.setattr(Assembly, "add", slow)
        answer = e.submit("restored", prompt(1500), 2)
        assert begun.wait(10)
        e.engine.cancel("restored")
        assert answer.over.wait(60)
        assert len(added) < 1500 // BLOCK, "it was restored to the end"
        assert e.ask("next", prompt(20, seed=9), 3).finish == "length"
    assert answer.finish == "cancelled"


def test_a_restore_that_breaks_is_a_miss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kv_assembly import Assembly

    def broken(assembly: Assembly, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        raise MemoryError

    with running(model, None) as e:
        cold = e.ask("cold", prompt(300), 12)
        monkeypatch.setattr(Assembly, "add", broken)
        again = e.ask("again", prompt(300), 12)
    assert again.cached == 0
    assert again.ids == cold.ids
