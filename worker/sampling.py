"""From a request's sampling parameters to mlx_lm's sampler and logits processors.

Order of filters as in Hugging Face's: temperature, top_k, top_p, min_p; then XTC. One sampler object serves every request with
equal parameters, so a whole batch is drawn in one call; a seeded request has its own with its own key, so its draws do not
depend on its neighbours. Used on the engine thread only; must not know engines, text or requests.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import mlx.core as mx

from supervisor.protocol import Sampling
from worker.faults import BadJob
from worker.mlx_types import Processor, Sampler, summed_at

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd and large: the places of one seed are never those of a neighbouring one."""
GREEDY_BELOW = 1e-5
TOP_P_CANDIDATES = 1024
"""Sorting a whole vocabulary of 49k takes 44 ms a step at 8 rows on a CPU, partitioning off this many first 5.5 ms."""
REPETITION_WINDOW_TOKENS = 20
"""mlx_lm's default."""
XTC_THRESHOLD = 0.1
"""llama.cpp's default."""
NOTHING = -math.inf


@dataclass(frozen=True, slots=True)
class Shape:
    """How the distribution is cut; the neutral values leave it as it is."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = XTC_THRESHOLD
    spared: tuple[int, ...] = ()
    """End tokens, which XTC leaves alone: without them answers would not end."""


def check(sampling: Sampling, vocab_size: int) -> None:
    """Raises BadJob for parameters that no sampler can honour."""
    beyond = [token for token in sampling.logit_bias or {} if not 0 <= token < vocab_size]
    if beyond:
        raise BadJob(f"logit_bias names token {beyond[0]}; this model's vocabulary has the ids 0 to {vocab_size - 1}.")
    if sampling.repetition_penalty is not None and not sampling.repetition_penalty > 0:
        raise BadJob(f"repetition_penalty must be greater than 0, not {sampling.repetition_penalty}.")
    if sampling.temperature is not None and not sampling.temperature >= 0:
        raise BadJob(f"temperature must be at least 0, not {sampling.temperature}.")
    for name, value in (("xtc_probability", sampling.xtc_probability), ("xtc_threshold", sampling.xtc_threshold)):
        if value is not None and not 0 <= value <= 1:
            raise BadJob(f"{name} must be between 0 and 1, not {value}.")


def sampler_for(
    sampling: Sampling, choice: int = 0, eos_ids: frozenset[int] = frozenset(), *, drawn_tokens: int = 0
) -> Sampler:
    """`choice` tells the answers of one seeded request with n > 1 apart; one that goes on has `drawn_tokens` behind it."""
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if temperature < GREEDY_BELOW or sampling.top_k == 1:
        return greedy
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    shape = Shape(temperature, max(0, sampling.top_k or 0), top_p, sampling.min_p or 0.0)
    if sampling.xtc_probability:
        threshold = XTC_THRESHOLD if sampling.xtc_threshold is None else sampling.xtc_threshold
        spared = tuple(sorted(eos_ids))
        shape = replace(shape, xtc_probability=sampling.xtc_probability, xtc_threshold=threshold, spared=spared)
    if sampling.seed is None:
        return _shared(shape)
    return _seeded(shape, sampling.seed + choice, drawn_tokens)


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


@functools.lru_cache(maxsize=256)
def _shared(shape: Shape) -> Sampler:
    return functools.partial(draw, shape=shape)


def _seeded(shape: Shape, seed: int, drawn_tokens: int) -> Sampler:
    """Each draw's key follows from the seed and its place: a sequence can be put aside and go on as if it had not been."""
    places = itertools.count(drawn_tokens)

    def sample(logprobs: mx.array) -> mx.array:
        key = mx.random.key((seed * SEED_STRIDE + next(places)) % 2**63)
        return draw(logprobs, shape=shape, key=key)

    return sample


def draw(logprobs: mx.array, *, shape: Shape, key: mx.array | None = None) -> mx.array:
    """Token ids `[rows]` drawn from log-probabilities `[rows, vocabulary]` cut to `shape`."""
    logits = logprobs.astype(mx.float32) / shape.temperature
    ids: mx.array | None = None
    if 0 < shape.top_k < logits.shape[-1]:
        ids = _largest(logits, shape.top_k)
        logits = mx.take_along_axis(logits, ids, axis=-1)
    if shape.top_p < 1.0:
        logits, ids = _nucleus(logits, ids, shape.top_p)
    if shape.min_p > 0.0:
        floor = mx.max(logits, axis=-1, keepdims=True) + math.log(shape.min_p)
        logits = mx.where(logits < floor, NOTHING, logits)
    if shape.xtc_probability > 0.0:
        xtc_key, key = (None, None) if key is None else mx.random.split(key)
        logits = _without_top_choices(logits, ids, shape, xtc_key)
    drawn = mx.random.categorical(logits, axis=-1, key=key)
    return drawn if ids is None else mx.take_along_axis(ids, drawn[:, None], axis=-1).squeeze(-1)


def _largest(logits: mx.array, count: int) -> mx.array:
    """Ids of the `count` largest per row, in no order."""
    return mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count]


def _nucleus(logits: mx.array, ids: mx.array | None, top_p: float) -> tuple[mx.array, mx.array]:
    """The smallest set of most likely tokens whose mass reaches `top_p`, sorted; the others get no mass."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    if ids is None and logits.shape[-1] > TOP_P_CANDIDATES:
        ids = _largest(logits, TOP_P_CANDIDATES)
        candidates = mx.take_along_axis(logits, ids, axis=-1)
        reached = mx.exp(candidates - total).sum(axis=-1)
        if bool(mx.all(reached >= top_p)):
            logits = candidates
        else:  # a flat distribution: only the whole vocabulary gives the exact answer
            ids = None
    order = mx.argsort(-logits, axis=-1)
    logits = mx.take_along_axis(logits, order, axis=-1)
    probabilities = mx.exp(logits - total)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    # The most likely token always stays: top_p 0 means greedy.
    outside = (before >= top_p) & (mx.arange(logits.shape[-1]) > 0)
    return mx.where(outside, NOTHING, logits), order if ids is None else mx.take_along_axis(ids, order, axis=-1)


def _without_top_choices(logits: mx.array, ids: mx.array | None, shape: Shape, key: mx.array | None) -> mx.array:
    """XTC: with its probability, a row loses all tokens above the threshold but the least likely of them."""
    probabilities = mx.softmax(logits, axis=-1)
    tokens = mx.arange(logits.shape[-1]) if ids is None else ids
    above = (probabilities >= shape.xtc_threshold) & (probabilities > 0)
    for token in shape.spared:
        above = above & (tokens != token)
    least = mx.min(mx.where(above, logits, math.inf), axis=-1, keepdims=True)
    is_excluding = mx.random.uniform(shape=(logits.shape[0], 1), key=key) < shape.xtc_probability
    return mx.where(is_excluding & above & (logits > least), NOTHING, logits)


def processors_for(sampling: Sampling, prompt_tokens: int, vocab_size: int, eos_ids: frozenset[int]) -> list[Processor]:
    """What changes the logits before sampling.

    The repetition penalty looks back over prompt and output together, presence and frequency count the output only, as OpenAI
    defines them. The context handed in by mlx_lm includes a restored prefix.
    """
    chosen: list[Processor] = []
    if sampling.logit_bias:
        chosen.append(_bias(sampling.logit_bias, vocab_size))
    if sampling.repetition_penalty not in (None, 1.0):
        chosen.append(_repetition(sampling.repetition_penalty, vocab_size))
    if sampling.presence_penalty or sampling.frequency_penalty:
        chosen.append(_counted(sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0, prompt_tokens, vocab_size))
    if eos_ids and sampling.min_tokens:
        chosen.append(_no_end_before(prompt_tokens + sampling.min_tokens, sorted(eos_ids), vocab_size))
    return chosen


def _bias(bias: dict[int, float], vocab_size: int) -> Processor:
    values = summed_at(vocab_size, mx.array(list(bias)), mx.array(list(bias.values()), dtype=mx.float32))
    return lambda _, logits: logits + values.astype(logits.dtype)


def _repetition(penalty: float, vocab_size: int) -> Processor:
    def process(context: mx.array, logits: mx.array) -> mx.array:
        seen = _counts(context[-REPETITION_WINDOW_TOKENS:], vocab_size) > 0
        return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)

    return process


def _counted(presence: float, frequency: float, prompt_tokens: int, vocab_size: int) -> Processor:
    def process(context: mx.array, logits: mx.array) -> mx.array:
        if context.size <= prompt_tokens:
            return logits
        counts = _counts(context[prompt_tokens:], vocab_size)
        return logits - (counts * frequency + (counts > 0) * presence).astype(logits.dtype)

    return process


def _no_end_before(length: int, eos_ids: list[int], vocab_size: int) -> Processor:
    barred = summed_at(vocab_size, mx.array(eos_ids), mx.array(NOTHING))

    def process(context: mx.array, logits: mx.array) -> mx.array:
        return logits + barred.astype(logits.dtype) if context.size < length else logits

    return process


def _counts(tokens: mx.array, vocab_size: int) -> mx.array:
    return summed_at(vocab_size, tokens, mx.array(1.0))
