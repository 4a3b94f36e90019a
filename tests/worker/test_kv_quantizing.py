"""KV in few bits: a restored run is the cold one wherever quantizing begins, models that cannot say so, and what it costs."""

from pathlib import Path

import pytest

from supervisor.protocol import Sampling
from tests.stands.families import family_model
from tests.worker.test_families_bits import CHUNKS, Bench, distance, files, prompt, run
from worker.admission import KvCost
from worker.checkpoint import open_checkpoint
from worker.faults import ModelUnloadable
from worker.kv_quantizing import KvQuantizing
from worker.loader import load
from worker.sampling import sampler_for
from worker.scoring import Scoring
from worker.serial_lane import SerialLane


def bench(tmp_path: Path, quantizing: KvQuantizing | None, family: str = "llama", **config: object) -> Bench:
    config = {"head_dim": 64} | config if family == "llama" else config
    checkpoint = open_checkpoint(family_model(tmp_path / family, family, **config))
    return Bench(family, load(checkpoint, lambda *_: None, quantizing), tmp_path / "store")


@pytest.mark.parametrize("start", [0, 40, 100, 199, 205])
def test_a_restored_run_is_the_cold_run_wherever_quantizing_begins(tmp_path: Path, start: int) -> None:
    of = bench(tmp_path, KvQuantizing(8, 32, start))
    assert of.is_serial
    cold = run(of, of.open(disk=True), prompt(200), 40)
    hot = run(of, of.caches[0], prompt(200), 40)
    again = run(of, of.open(disk=True), prompt(200), 40)
    longer = [*prompt(200), *cold.ids, 5]
    turn = run(of, of.open(disk=True), longer, 4)
    fresh = run(of, None, longer, 4)
    is_kept = start < 200
    assert (cold.restored_tokens, again.restored_tokens, turn.restored_tokens) == (0, 192 * (start <= 192), 240)
    assert hot.restored_tokens == 199 * is_kept
    assert distance(cold, again) == distance(cold, hot) == 0
    assert distance(turn, fresh) < 2e-2, "decoded rows and prefilled ones round differently, in few bits too"


@pytest.mark.parametrize("start", [0, 40])
def test_a_sequence_without_a_row_yet_takes_no_bytes(tmp_path: Path, start: int) -> None:
    """The lane is asked at any time for what it holds, also between taking a prompt and its first step."""
    of = bench(tmp_path, KvQuantizing(8, 32, start))
    lane = SerialLane(of.loaded.model, CHUNKS, of.loaded.quantizing)
    lane.insert(prompt(200), 0, of.loaded.new_cache(), sampler_for(Sampling(temperature=0)), [])
    assert lane.cache_bytes == 0
    lane.step()
    assert lane.cache_bytes > 0


def test_the_rows_are_near_those_that_are_not_quantized(tmp_path: Path) -> None:
    plain = run(bench(tmp_path, None), None, prompt(200), 1)
    eight = run(bench(tmp_path, KvQuantizing(8, 64, 0)), None, prompt(200), 1)
    four = run(bench(tmp_path, KvQuantizing(4, 32, 0)), None, prompt(200), 1)
    late = run(bench(tmp_path, KvQuantizing(4, 32, 500)), None, prompt(200), 1)
    assert 0 < distance(plain, eight) < 0.02 < distance(plain, four)
    assert distance(plain, late) < 1e-4, "quantized before its time"


def test_fewer_tokens_than_its_start_are_neither_kept_nor_found(tmp_path: Path) -> None:
    """Their rows are not those of the layout yet; and a cold run has them at full precision."""
    of = bench(tmp_path, KvQuantizing(8, 32, 150))
    cache = of.open(disk=True)
    assert run(of, cache, prompt(120)).restored_tokens == 0
    assert files(of, snapshots=False) == []
    cold = run(of, of.open(disk=True), prompt(200))
    shorter = run(of, of.caches[0], prompt(200)[:140])
    assert shorter.restored_tokens == 0
    assert of.caches[0].probe(of.caches[0].new_chain(""), prompt(200)[:140]) == (0, 0), "what a client would be told"
    files(of, snapshots=False)[8].write_bytes(b"")
    again = run(of, of.open(disk=True), prompt(200))
    assert again.restored_tokens == 0, "what is left is shorter than the start"
    assert distance(cold, again) == 0


def test_scores_of_a_prompt_are_those_of_the_run_that_goes_on_from_them(tmp_path: Path) -> None:
    loaded = bench(tmp_path, KvQuantizing(4, 32, 50)).loaded
    found: list[list[object]] = []
    for chunk in (7, 64):
        scoring = Scoring(loaded.model, loaded.new_cache(), prompt(120), 0, loaded.vocab_size, chunk, loaded.quantizing)
        scored = scoring.advance(float("inf"))
        assert scored is not None and scored.cache is not None
        assert all(type(leaf).__name__ == "QuantizedKVCache" for leaf in scored.cache)
        found.append([entry["logprob"] for entry in scoring.entries[1:]])
    assert found[0] == pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("llama", {"head_dim": 16}, "kv_bits 8 with kv_group_size 32"),
        ("gemma3_text", {"head_dim": 32}, "mlx-lm cannot quantize RotatingKVCache"),
        ("mamba2", {}, "its cache is made of ArraysCache"),
    ],
)
def test_a_model_that_cannot_have_it_is_refused_with_the_reason(tmp_path: Path, family: str, config: dict, reason: str) -> None:
    with pytest.raises(ModelUnloadable, match=reason):
        bench(tmp_path, KvQuantizing(8, 32, 0), family, **config)


def test_admission_counts_the_bits_and_what_comes_before_them(tmp_path: Path) -> None:
    plain, four = bench(tmp_path, None).loaded, bench(tmp_path, KvQuantizing(4, 32, 0)).loaded
    share = (4 / 8 + 2 * 4 / 32) / 4  # of float32: half a byte a number, and a scale and a bias for 32
    assert four.kv_bytes_per_token == int(plain.kv_bytes_per_token * share)
    cost = KvCost(((10, None),), early=KvCost(((100, None),)), early_tokens=50)
    assert [cost.bytes(tokens) for tokens in (1, 50, 60, 1000)] == [100, 5000, 5000, 10_000]


def test_quantizing_begins_at_its_token_and_not_at_the_end_of_a_chunk(tmp_path: Path) -> None:
    """Else a prompt that goes on from another's blocks would attend to other rows than a cold one."""
    of = bench(tmp_path, KvQuantizing(2, 32, 100))
    run(of, of.open(), prompt(200))
    other = [*prompt(200)[:112], *prompt(50, seed=9)]
    on = run(of, of.caches[0], other, 1)
    assert on.restored_tokens == 112
    assert distance(on, run(of, None, other, 1)) < 1e-3
