"""What is reported about tokens beside the tokens: how likely the model found them, in an answer and in a prompt."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from supervisor.protocol import CacheGrant, Sampling
from tests.stands.equality import assert_same_greedy, greedy_ids, model_logprobs
from tests.stands.families import FAMILIES, UNCACHED, family_model
from tests.stands.models import tiny_model
from tests.stands.sink import GREEDY, Answer, ForcedText, RunningEngine
from worker.job import Job

CLOSE = 2e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(10, 400), k=length)


def running(model: Path, **more: object) -> RunningEngine:
    return RunningEngine(model, text=ForcedText(), **more)  # type: ignore[arg-type]


def submit(
    e: RunningEngine,
    rid: str,
    ids: Sequence[int],
    max_tokens: int,
    *,
    top: int | None,
    echo: str | None = None,
    sampling: Sampling = GREEDY,
) -> Answer:
    e.engine.submit(Job(rid, tuple(ids), sampling, max_tokens, submitted_at=time.monotonic(), logprobs=top, echo=echo))
    return e.sink.of(rid)


def entries(answer: Answer) -> list[dict[str, object]]:
    assert answer.over.wait(60)
    assert answer.error is None
    return [entry for row in answer.rows for entry in row.logprobs or []]


def assert_scored(model: Path, ids: Sequence[int], got: Sequence[dict[str, object]], top: int, start: int) -> None:
    """`got` belongs to `ids[start:]`, each judged by what came before it."""
    expected = model_logprobs(model, ids)
    assert [entry["id"] for entry in got] == list(ids[start:])
    for position, entry in enumerate(got, start):
        if position == 0:
            assert entry["logprob"] is None and entry["top"] == []
            continue
        row = expected[position - 1]
        assert entry["logprob"] == pytest.approx(row[ids[position]], abs=CLOSE)
        likely = entry["top"]
        assert isinstance(likely, list) and len(likely) == top
        assert [found["logprob"] for found in likely] == pytest.approx(np.sort(row)[::-1][:top].tolist(), abs=CLOSE)
        assert all(found["logprob"] == pytest.approx(row[found["id"]], abs=CLOSE) for found in likely)


@pytest.mark.parametrize("top", [0, 1, 5])
def test_each_token_comes_with_the_models_own_probability_whatever_changed_its_chances(model: Path, top: int) -> None:
    ids = prompt(70)
    heavy = Sampling(temperature=0.7, seed=3, presence_penalty=1.5, logit_bias={17: 8.0, 200: -100.0}, repetition_penalty=1.3)
    with running(model) as e:
        answer = submit(e, "a", ids, 12, top=top, sampling=heavy)
        got = entries(answer)
    assert len(got) == 12
    assert_scored(model, [*ids, *answer.ids], got, top, len(ids))


def test_only_who_asks_is_told_and_neighbours_answer_as_alone(model: Path) -> None:
    with running(model) as e:
        with e.at_once():
            asked = [submit(e, f"asked{i}", prompt(30 + i), 24, top=2) for i in range(2)]
            plain = [submit(e, f"plain{i}", prompt(90 + i), 24, top=None) for i in range(2)]
        assert all(answer.over.wait(60) for answer in (*asked, *plain))
    assert any(len(step) > 2 for step in e.sink.steps), "nothing was batched"
    for i, answer in enumerate(asked):
        assert_scored(model, [*prompt(30 + i), *answer.ids], entries(answer), 2, 30 + i)
    for i, answer in enumerate(plain):
        assert all(row.logprobs is None for row in answer.rows)
        assert_same_greedy(model, prompt(90 + i), greedy_ids(model, prompt(90 + i), 24), answer.ids)


@pytest.mark.parametrize("length", [1, 2, 64, 300])
def test_an_echoed_prompt_is_scored_token_by_token(model: Path, length: int) -> None:
    ids = prompt(length)
    with running(model, cache=CacheGrant(hot_bytes=64 << 20)) as e:
        e.ask("warms the cache", ids, 1)
        answer = submit(e, "a", ids, 2, top=1, echo="ECHO ")
        got = entries(answer)
        other = prompt(length, seed=9)
        entries(submit(e, "fills nothing", other, 1, top=1, echo=""))
        assert e.ask("finds nothing", other, 1).cached == 0
    assert answer.text.startswith("ECHO ") and answer.text.count("ECHO") == 1
    answer.text = answer.text.removeprefix("ECHO ")
    assert_scored(model, [*ids, *answer.ids], got, 1, 0)
    assert_same_greedy(model, ids, greedy_ids(model, ids, 2), answer.ids)
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.cached) == (length, 0)
    assert answer.rows[0].tokens == 1 and len(answer.rows) == 2
    timings = answer.rows[0].timings
    assert timings is not None and timings.restore_s == 0 < timings.prefill_s, "a prompt that is scored is computed"


@pytest.mark.parametrize("top", [None, 1])
def test_an_echo_alone_says_the_prompt_and_no_token_more(model: Path, top: int | None) -> None:
    ids = prompt(100)
    with running(model, cache=CacheGrant(hot_bytes=64 << 20)) as e:
        answer = submit(e, "a", ids, 0, top=top, echo="ECHO")
        got = entries(answer)
        stream = submit(e, "goes on", ids, 5, top=None)
        assert stream.over.wait(60)
    assert (answer.text, answer.finish, len(answer.rows)) == ("ECHO", "length", 1)
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 0)
    assert answer.rows[0].tokens == 0
    if top is None:
        assert got == []
    else:
        assert_scored(model, ids, got, top, 0)
    assert_same_greedy(model, ids, greedy_ids(model, ids, 5), stream.ids)


def test_the_sum_over_a_continuation_is_its_loglikelihood(model: Path) -> None:
    """As lm-eval asks and adds up: context and continuation as one prompt, one more token than is wanted."""
    context, continuation = prompt(40), prompt(9, seed=2)
    with running(model) as e:
        scored = entries(
            submit(e, "a", [*context, *continuation], 1, top=1, echo="", sampling=Sampling(temperature=0, seed=1234))
        )
    total = sum(entry["logprob"] for entry in scored[len(context) : -1])  # type: ignore[misc]
    rows = model_logprobs(model, [*context, *continuation])
    expected = sum(rows[len(context) + i - 1][token] for i, token in enumerate(continuation))
    assert total == pytest.approx(float(expected), abs=1e-3)


def test_streams_go_on_while_a_prompt_is_scored_and_a_cancel_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.arrivals.RESTORE_SLICE_S", 0.0)  # one chunk per step, however fast the machine is
    with running(model) as e:
        stream = e.submit("stream", prompt(5), 10_000)
        while len(stream.rows) < 3:
            time.sleep(0.001)
        assert submit(e, "long", prompt(1900), 1, top=1, echo="").over.wait(60)
        dropped = submit(e, "dropped", prompt(1900, seed=5), 1, top=1, echo="")
        e.engine.cancel("dropped")
        assert dropped.over.wait(60)
        e.engine.cancel("stream")
        e.settle()
    assert dropped.finish == "cancelled"
    first_of_long = next(i for i, step in enumerate(e.sink.steps) if any(row.rid == "long" for row in step))
    # 1899 tokens in chunks of 64 are 30 steps, and the stream decodes in each.
    assert sum(any(row.rid == "stream" for row in step) for step in e.sink.steps[:first_of_long]) >= 29


def test_a_model_that_fails_while_scoring_fails_that_request_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device said no")

    with running(model) as e:
        stream = e.submit("stream", prompt(5), 60)
        while not stream.rows:
            time.sleep(0.001)
        with monkeypatch.context() as patch:
            patch.setattr("worker.scoring.Scoring.advance", broken)
            failed = submit(e, "failed", prompt(50), 1, top=1, echo="")
            assert failed.over.wait(60) and failed.error is not None
        assert stream.over.wait(60)
        assert submit(e, "again", prompt(50), 1, top=1, echo="").over.wait(60)
    assert_same_greedy(model, prompt(5), greedy_ids(model, prompt(5), 60), stream.ids)


def test_the_choices_of_one_request_share_the_prompts_prefill(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.generate import PromptProcessingBatch

    computed = 0
    original = PromptProcessingBatch.prompt

    def prompt_and_count(batch: PromptProcessingBatch, tokens: list[list[int]]) -> None:
        nonlocal computed
        computed += sum(map(len, tokens))
        original(batch, tokens)

    ids = prompt(300)
    with running(model, cache=CacheGrant(hot_bytes=64 << 20)) as e:
        monkeypatch.setattr(PromptProcessingBatch, "prompt", prompt_and_count)
        e.submit("a", ids, 10, Sampling(temperature=1.0, seed=5, n=4))
        answers = [e.sink.of("a", choice) for choice in range(4)]
        assert all(answer.over.wait(60) for answer in answers)
        again = [e.ask("b", ids, 10, Sampling(temperature=1.0, seed=5, n=1))]
    assert computed <= len(ids) + 1
    assert [answer.cached for answer in answers] == [0, 299, 299, 299]
    assert len({answer.text for answer in answers}) == 4
    assert again[0].text == answers[0].text


@pytest.mark.parametrize("family", [*FAMILIES, *UNCACHED])
def test_models_of_every_cache_family_score_prompts_and_answers(tmp_path: Path, family: str) -> None:
    """Also those that are served one at a time, and beside a stream where two fit."""
    model = family_model(tmp_path / family, family)
    ids = prompt(150)
    with running(model) as e:
        beside = e.submit("beside", prompt(20), 30)
        scored = submit(e, "scored", ids, 12, top=2, echo="")
        answered = submit(e, "answered", ids, 12, top=2)
        got, short = entries(scored), entries(answered)
        assert beside.over.wait(60)
    assert_scored(model, [*ids, *scored.ids], got, 2, 0)
    assert_scored(model, [*ids, *answered.ids], short, 2, len(ids))
    assert_same_greedy(model, ids, greedy_ids(model, ids, 12), scored.ids)
    assert_same_greedy(model, prompt(20), greedy_ids(model, prompt(20), 30), beside.ids)
