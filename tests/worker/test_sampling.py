"""Sampling by itself: which tokens can be drawn, how often, and what the processors do to the logits."""

import math

import numpy as np
import pytest

from supervisor.protocol import Sampling
from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from worker.sampling import (  # noqa: E402
    Shape,
    draw,
    greedy,
    processors_for,
    sampler_for,
)

VOCABULARY = 3000


def distribution(seed: int = 0, *, scale: float = 3.0, rows: int = 1) -> mx.array:
    logits = mx.array(np.random.default_rng(seed).normal(0, scale, (rows, VOCABULARY)).astype(np.float32))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def drawn(shape: Shape, logprobs: mx.array, times: int = 400) -> set[int]:
    many = mx.broadcast_to(logprobs, (times, VOCABULARY))
    return set(draw(many, shape=shape, key=mx.random.key(1)).tolist())  # type: ignore[arg-type]


def nucleus(logprobs: mx.array, shape: Shape) -> set[int]:
    """By the book: temperature, top_k, top_p, min_p, each over what the one before left, in float64."""
    logits = np.array(logprobs, dtype=np.float64)[0] / shape.temperature
    order = np.argsort(-logits)[: shape.top_k or None]
    p = np.exp(logits[order] - logits[order].max())
    p /= p.sum()
    kept = order[(np.cumsum(p) - p < shape.top_p) | (np.arange(len(p)) == 0)]
    floor = math.log(shape.min_p) if shape.min_p else -math.inf
    return {int(i) for i in kept if logits[i] >= logits[order[0]] + floor}


@pytest.mark.parametrize(
    "shape",
    [
        Shape(top_k=5),
        Shape(top_p=0.5),
        Shape(top_p=0.9),
        Shape(top_p=0.0),
        Shape(min_p=0.2),
        Shape(temperature=0.3, top_p=0.9),
        Shape(temperature=2.0, top_k=40, top_p=0.8),
        Shape(top_k=100, top_p=0.9, min_p=0.05),
    ],
)
def test_only_what_the_shape_leaves_is_drawn_and_all_of_it_can_be(shape: Shape) -> None:
    logprobs = distribution()
    allowed = nucleus(logprobs, shape)
    got = drawn(shape, logprobs, 4000)
    assert got <= allowed
    if len(allowed) <= 12:
        assert got == allowed


def test_a_flat_distribution_takes_the_exact_way() -> None:
    shape = Shape(top_p=0.9)
    flat = distribution(scale=0.01)
    got = drawn(shape, flat, 4000)
    assert len(got) > 1024, "cut off at the number of candidates"
    assert got <= nucleus(flat, shape)


def test_draws_follow_the_probabilities() -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05] + [0.0] * (VOCABULARY - 4)]))
    many = mx.broadcast_to(logprobs, (8000, VOCABULARY))
    counts = np.bincount(np.array(draw(many, shape=Shape(top_p=0.94), key=mx.random.key(3))), minlength=4) / 8000
    assert np.abs(counts[:4] - np.array([0.5, 0.3, 0.15, 0.0]) / 0.95).max() < 0.02


def test_equal_parameters_share_a_sampler_and_seeded_ones_do_not() -> None:
    parameters = Sampling(temperature=0.7, top_p=0.9)
    assert sampler_for(parameters) is sampler_for(Sampling(temperature=0.7, top_p=0.9))
    assert sampler_for(parameters) is not sampler_for(Sampling(temperature=0.7, top_p=0.8))
    assert sampler_for(Sampling(temperature=0.0)) is greedy
    seeded = Sampling(temperature=0.7, seed=1)
    assert sampler_for(seeded) is not sampler_for(seeded)


def test_a_seed_fixes_every_draw_whatever_others_draw() -> None:
    logprobs = distribution()
    one, two = (sampler_for(Sampling(temperature=1.0, seed=-5)) for _ in range(2))
    first = [one(logprobs).item() for _ in range(10)]
    second: list[object] = []
    for _ in range(10):
        sampler_for(Sampling(temperature=1.0))(logprobs)
        second.append(two(logprobs).item())
    assert first == second
    assert len(set(first)) > 3


def by_the_book(logprobs: mx.array, threshold: float, spared: set[int]) -> tuple[set[int], set[int]]:
    """All that can be drawn, and what is left of it where XTC strikes."""
    p = np.exp(np.array(logprobs, dtype=np.float64)[0])
    possible = {int(i) for i in np.nonzero(p > 0)[0]}
    above = [i for i in possible if p[i] >= threshold and i not in spared]
    return possible, possible - set(sorted(above, key=lambda i: -p[i])[:-1])


FEW = [0.4, 0.3, 0.15, 0.1, 0.05]


def few() -> mx.array:
    return mx.log(mx.array([FEW + [0.0] * (VOCABULARY - len(FEW))]))


@pytest.mark.parametrize(("threshold", "spared"), [(0.12, ()), (0.12, (0,)), (0.35, ()), (0.9, ()), (0.0, ())])
def test_xtc_leaves_only_the_least_likely_of_those_above_its_threshold(threshold: float, spared: tuple[int, ...]) -> None:
    always = Shape(xtc_probability=1.0, xtc_threshold=threshold, spared=spared)
    _, left = by_the_book(few(), threshold, set(spared))
    assert drawn(always, few(), 4000) == left


def test_xtc_strikes_row_by_row_with_its_probability_and_after_the_other_filters() -> None:
    many = mx.broadcast_to(few(), (8000, VOCABULARY))
    shape = Shape(top_k=3, xtc_probability=0.25, xtc_threshold=0.2)
    counts = np.bincount(np.array(draw(many, shape=shape, key=mx.random.key(4))), minlength=5) / 8000
    # Of the three left (0.47, 0.35, 0.18) the first is above 0.2 and goes in a quarter of the rows; the second stays.
    kept = np.array([0.4, 0.3, 0.15]) / 0.85
    struck = np.array([0.0, 0.3, 0.15]) / 0.45
    assert np.abs(counts[:3] - (0.75 * kept + 0.25 * struck)).max() < 0.02 and counts[3:].sum() == 0


def test_a_sequence_that_was_put_aside_draws_on_where_it_was() -> None:
    wanted = Sampling(temperature=1.0, seed=12, top_p=0.95)
    logprobs = distribution()
    throughout = sampler_for(wanted, 1)
    whole = [throughout(logprobs).item() for _ in range(12)]
    later = sampler_for(wanted, 1, drawn_tokens=5)
    assert [later(logprobs).item() for _ in range(7)] == whole[5:]


def test_xtc_draws_from_the_requests_own_key() -> None:
    wanted = Sampling(temperature=1.0, seed=11, xtc_probability=0.5)
    one, two = (sampler_for(wanted, eos_ids=frozenset({2})) for _ in range(2))
    first = [one(few()).item() for _ in range(40)]
    second: list[object] = []
    for _ in range(40):
        mx.random.uniform()
        second.append(two(few()).item())
    assert first == second
    assert len(set(first)) > 2


def processed(sampling: Sampling, context: list[int], logits: mx.array, *, prompt: int = 4, eos: frozenset[int] = frozenset()):
    for process in processors_for(sampling, prompt, VOCABULARY, eos):
        logits = process(mx.array(context, dtype=mx.int32), logits)
    return np.array(logits)[0]


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = distribution()
    got = processed(Sampling(presence_penalty=0.5, frequency_penalty=0.25), [1, 2, 3, 4, 7, 7, 7, 9], logits)
    expected = np.array(logits)[0].copy()
    expected[7] -= 0.5 + 3 * 0.25
    expected[9] -= 0.5 + 0.25
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_repetition_penalty_looks_back_over_prompt_and_output_within_its_window() -> None:
    logits = mx.array(np.linspace(-4, 4, VOCABULARY, dtype=np.float32))[None]
    context = [50, *range(100, 118), 100, 2900]
    got = processed(Sampling(repetition_penalty=2.0), context, logits)
    expected = np.array(logits)[0].copy()
    for token in {*context[1:]}:
        expected[token] = expected[token] * 2 if expected[token] < 0 else expected[token] / 2
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_end_tokens_are_barred_until_min_tokens_are_out() -> None:
    logits = distribution()
    barred = processed(Sampling(min_tokens=2), [1, 2, 3, 4, 8], logits, eos=frozenset({5, 6}))
    assert barred[5] == barred[6] == -math.inf
    assert np.isfinite(processed(Sampling(min_tokens=2), [1, 2, 3, 4, 8, 8], logits, eos=frozenset({5, 6}))).all()


def test_neutral_parameters_cost_nothing() -> None:
    neutral = Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, min_tokens=0)
    assert processors_for(neutral, 4, VOCABULARY, frozenset({5})) == []
    assert processors_for(Sampling(), 4, VOCABULARY, frozenset({5})) == []


def test_the_dtype_of_the_logits_is_kept() -> None:
    logits = distribution().astype(mx.bfloat16)
    heavy = Sampling(presence_penalty=1.0, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=9)
    for process in processors_for(heavy, 2, VOCABULARY, frozenset({5})):
        logits = process(mx.array([1, 2, 3]), logits)
    assert logits.dtype == mx.bfloat16
