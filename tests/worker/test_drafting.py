"""Speculative decoding at the lane: whatever a draft proposes, the answer is the one without, and the cache holds just that."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stands.models import tiny_model
from tests.worker.test_families_bits import CHUNKS
from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from supervisor.protocol import Sampling  # noqa: E402
from worker.checkpoint import open_checkpoint  # noqa: E402
from worker.drafting import DraftModel, check_same_tokens, joined  # noqa: E402
from worker.faults import ModelUnloadable  # noqa: E402
from worker.kv_leaves import columns_of, leaves_of  # noqa: E402
from worker.kv_quantizing import KvQuantizing  # noqa: E402
from worker.loader import LoadedModel, load  # noqa: E402
from worker.logprobs import Recorder  # noqa: E402
from worker.sampling import processors_for, sampler_for  # noqa: E402
from worker.serial_lane import SerialLane  # noqa: E402

PROMPT = random.Random(5).choices(range(10, 400), k=150)
STEPS = 40
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Pair:
    large: LoadedModel
    drafts: dict[str, LoadedModel]

    def draft(self, name: str, most_tokens: int = 3) -> DraftModel:
        return DraftModel(name, self.drafts[name], self.large.vocab_size, most_tokens)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    home = tmp_path_factory.mktemp("drafts")

    def opened(name: str, quantizing: KvQuantizing | None = None, **config: Any) -> LoadedModel:
        return load(open_checkpoint(tiny_model(home / name, head_dim=32, **config)), lambda *_: None, quantizing)

    return Pair(opened("large"), {"same": opened("same"), "shallow": opened("shallow", num_hidden_layers=1)})


def answer(
    loaded: LoadedModel, draft: DraftModel | None, sampling: Sampling = GREEDY, known: int = 0
) -> tuple[list[int], list[dict[str, object]]]:
    """Of `STEPS` tokens, and what each was given; `known` tokens of the prompt come as a restore brings them."""
    recorder = Recorder(2)
    processors = [recorder, *processors_for(sampling, len(PROMPT), loaded.vocab_size, frozenset())]
    lane = SerialLane(loaded.model, CHUNKS, loaded.quantizing, draft)
    cache = loaded.new_cache()
    if known:
        mx.eval(loaded.model(mx.array([PROMPT[:known]]), cache=cache))
    uid = lane.insert(PROMPT, known, cache, sampler_for(sampling), processors)
    ids, said = list(PROMPT), list[dict[str, object]]()
    while len(ids) < len(PROMPT) + STEPS:
        for produced, token in lane.step():
            assert produced == uid
            said += recorder.take(len(ids), token)
            ids.append(token)
        for held in lane.held():
            assert all(columns_of(leaf).end == held.tokens for _, leaf in leaves_of(held.leaves)), "rejected rows were left"
            assert held.tokens >= len(PROMPT) - 1 or ids == PROMPT
            assert held.tokens in (len(ids), *range(len(PROMPT)))
    lane.close()
    return ids[len(PROMPT) :][:STEPS], said[:STEPS]


@pytest.mark.parametrize("draft", ["same", "shallow"])
@pytest.mark.parametrize("most_tokens", [1, 3, 8])
def test_a_greedy_answer_is_the_one_without_a_draft(pair: Pair, draft: str, most_tokens: int) -> None:
    plain, said = answer(pair.large, None)
    model = pair.draft(draft, most_tokens)
    drafted, drafted_said = answer(pair.large, model)
    assert drafted == plain
    for one, other in zip(said, drafted_said, strict=True):
        assert (one["id"], one["logprob"]) == (other["id"], pytest.approx(other["logprob"], abs=1e-3))
    counts = model.counts
    assert counts.proposed > 0 and (counts.accepted == counts.proposed) == (draft == "same")


@pytest.mark.parametrize("draft", ["same", "shallow"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.8, seed=7, top_p=0.9), Sampling(temperature=0, repetition_penalty=1.5, presence_penalty=1.0)],
)
def test_draws_and_penalties_are_those_without_a_draft(pair: Pair, draft: str, sampling: Sampling) -> None:
    plain, _ = answer(pair.large, None, sampling)
    assert answer(pair.large, pair.draft(draft), sampling)[0] == plain
    assert answer(pair.large, pair.draft(draft, 8), sampling)[0] == plain


def test_a_draft_that_knows_nothing_of_a_restored_prompt_catches_up_while_the_answer_goes_on(pair: Pair) -> None:
    model = pair.draft("same")
    assert answer(pair.large, model, known=128)[0] == answer(pair.large, None, known=128)[0]
    assert model.counts.proposed == model.counts.accepted > 0


@pytest.mark.parametrize("start", [0, 160])
def test_a_draft_works_with_quantized_kv_too(tmp_path: Path, pair: Pair, start: int) -> None:
    path = tiny_model(tmp_path / "large", head_dim=32)
    quantized = load(open_checkpoint(path), lambda *_: None, KvQuantizing(8, 32, start))
    model = pair.draft("shallow")
    assert answer(quantized, model)[0] == answer(quantized, None)[0]
    assert model.counts.proposed > 0


def test_what_comes_after_the_end_of_an_answer_is_taken_back(pair: Pair) -> None:
    lane = SerialLane(pair.large.model, CHUNKS, None, pair.draft("same", 8))
    uid = lane.insert(PROMPT, 0, pair.large.new_cache(), sampler_for(GREEDY), [])
    while not (produced := lane.step()):
        pass
    assert len(produced) == 9
    lane.cut_back(uid, len(PROMPT) + 4)
    (held,) = lane.held()
    assert held.tokens == len(PROMPT) + 4
    assert all(columns_of(leaf).end == held.tokens for _, leaf in leaves_of(held.leaves))


def test_both_models_count_and_both_must_be_able_to_take_tokens_back(pair: Pair, tmp_path: Path) -> None:
    both = joined(pair.large, pair.draft("shallow"))
    own = pair.drafts["shallow"]
    assert both.weights_bytes == pair.large.weights_bytes + own.weights_bytes
    assert both.kv_bytes_per_token == pair.large.kv_bytes_per_token + own.kv_bytes_per_token
    sliding = load(open_checkpoint(tiny_model(tmp_path / "gemma", "gemma3_text")), lambda *_: None)
    with pytest.raises(ModelUnloadable, match="windowed cannot take tokens back, as layer 0 keeps a window"):
        joined(pair.large, DraftModel("windowed", sliding, sliding.vocab_size, 3))


def test_another_vocabulary_is_named_by_its_first_token_that_differs() -> None:
    check_same_tokens("d", {"a": 0, "b": 1}, {"a": 0, "b": 1})
    with pytest.raises(ModelUnloadable, match="d has another vocabulary: token 'b' is number 2 there and number 1 here"):
        check_same_tokens("d", {"a": 0, "b": 1}, {"a": 0, "c": 1, "b": 2})
