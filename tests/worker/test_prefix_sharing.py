"""Several requests with one new prefix compute it once, whoever is there to do it; and short prompts are kept as well."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.sink import Answer, ForcedText, Gate, RunningEngine

BLOCK = 16
PREFIX, TAIL, SIX = 1600, 9, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


def running(model: Path, *, block: int = BLOCK, hot_bytes: int = 64 << 20, store: Path | None = None) -> RunningEngine:
    directory = None if store is None else str(store)
    return RunningEngine(model, cache=CacheGrant(dir=directory, hot_bytes=hot_bytes, block=block), text=ForcedText())


def prefilled(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.prompt_tokens - answer.cached


def six_prompts() -> list[list[int]]:
    return [[*prompt(PREFIX), *prompt(TAIL, seed)] for seed in range(10, 10 + SIX)]


def test_six_at_once_cost_one_prefill_and_their_tails(model: Path) -> None:
    with running(model) as e:
        answers = [e.submit(f"r{i}", p, 8) for i, p in enumerate(six_prompts())]
        assert all(answer.over.wait(30) for answer in answers)
    assert sum(map(prefilled, answers)) <= 1.4 * PREFIX + SIX * TAIL
    for p, answer in zip(six_prompts(), answers, strict=True):
        assert_same_greedy(model, p, greedy_ids(model, p, 8), answer.ids)


@pytest.mark.parametrize("tier", ["RAM", "disk"])
def test_when_the_first_is_cancelled_midway_the_next_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    hot_bytes, store = (64 << 20, None) if tier == "RAM" else (0, tmp_path / "store")
    with running(model, hot_bytes=hot_bytes, store=store) as e:
        gate = Gate(monkeypatch)
        answers = [e.submit(f"r{i}", p, 8) for i, p in enumerate(six_prompts())]
        gate.let(3)
        e.engine.cancel("r0")
        gate.open()
        assert all(answer.over.wait(30) for answer in answers)
    first, *others = answers
    assert first.finish == "cancelled"
    assert 3 * 256 <= others[0].cached < PREFIX, "the second finds what the first had done"
    assert sum(map(prefilled, others)) + 3 * 256 <= 1.4 * PREFIX + SIX * TAIL
    for p, answer in zip(six_prompts()[1:], others, strict=True):
        assert_same_greedy(model, p, greedy_ids(model, p, 8), answer.ids)


def test_without_a_cache_the_six_would_cost_six_prefills(model: Path) -> None:
    """What the two tests above would see if nothing were shared."""
    with running(model, hot_bytes=0) as e:
        answers = [e.submit(f"r{i}", p, 2) for i, p in enumerate(six_prompts())]
        assert all(answer.over.wait(30) for answer in answers)
    assert sum(map(prefilled, answers)) == SIX * (PREFIX + TAIL)


@pytest.mark.parametrize("length", [20, 33, 60])
def test_a_short_prompt_that_comes_again_costs_half_at_most(model: Path, length: int) -> None:
    """With blocks of 256, as on a GPU, it never fills one."""
    with running(model, block=256) as e:
        cold = e.ask("cold", prompt(length), 12)
        warm = e.ask("warm", prompt(length), 12)
    assert prefilled(cold) == length
    assert prefilled(warm) <= length / 2
    assert warm.ids == cold.ids


def test_a_short_conversation_that_goes_on_starts_over_only_where_no_block_was_filled(model: Path) -> None:
    with running(model) as e:
        first = e.ask("first", prompt(30), 12)
        longer = [*prompt(30), *first.ids, *prompt(20, seed=5)]
        second = e.ask("second", longer, 4)
    assert second.cached == 42 // BLOCK * BLOCK
