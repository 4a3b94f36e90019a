"""An engine in this process on a tiny model: what it answers, how requests end, and that they do not disturb each other."""

import random
import time
from pathlib import Path

import psutil
import pytest

from supervisor.protocol import Code, Sampling
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.sink import ForcedText, Gate, RunningEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(10, 400), k=length)


def running(model: Path, **more: object) -> RunningEngine:
    return RunningEngine(model, text=ForcedText(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 257, 600])
def test_a_greedy_answer_is_what_mlx_lm_generates(model: Path, length: int) -> None:
    with running(model) as e:
        answer = e.ask("a", prompt(length), 24)
    assert_same_greedy(model, prompt(length), greedy_ids(model, prompt(length), 24), answer.ids)
    assert answer.finish == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 24)


def test_four_prompts_at_once_answer_as_each_would_alone(model: Path) -> None:
    lengths = {"a": 5, "b": 300, "c": 64, "d": 131}
    with running(model) as e:
        with e.at_once():
            answers = {rid: e.submit(rid, prompt(n), 10 + n % 17) for rid, n in lengths.items()}
        assert all(answer.over.wait(60) for answer in answers.values())
    assert any(len(step) > 1 for step in e.sink.steps), "nothing was batched"
    for rid, n in lengths.items():
        assert_same_greedy(model, prompt(n), greedy_ids(model, prompt(n), 10 + n % 17), answers[rid].ids)


def test_what_exceeds_the_batch_waits_its_turn_and_is_answered(model: Path) -> None:
    with running(model, max_batch=2) as e:
        with e.at_once():
            answers = [e.submit(f"r{i}", prompt(20, i), 6) for i in range(7)]
        assert all(answer.over.wait(60) for answer in answers)
        e.settle()
    assert max(len(step) for step in e.sink.steps) == 2
    order = [row.rid for step in e.sink.steps for row in step if row.seq == 0]
    assert order == sorted(order)
    for i, answer in enumerate(answers):
        assert_same_greedy(model, prompt(20, i), greedy_ids(model, prompt(20, i), 6), answer.ids)


def test_a_higher_priority_overtakes_those_that_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, max_batch=1) as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(5), 20)
        gate.let(3)
        answers = [first, e.submit("second", prompt(9), 2), e.submit("urgent", prompt(8), 2, priority=5)]
        gate.open()
        assert all(answer.over.wait(60) for answer in answers)
    order = [row.rid for step in e.sink.steps for row in step if row.seq == 0]
    assert order == ["first", "urgent", "second"]


def test_running_streams_go_on_while_a_long_prompt_is_prefilled(model: Path) -> None:
    with running(model) as e:
        stream = e.submit("stream", prompt(5), 10_000)
        while len(stream.rows) < 3:
            time.sleep(0.001)
        assert e.submit("long", prompt(1500), 1).over.wait(60)
        e.engine.cancel("stream")
        assert stream.over.wait(60)
    first_of_long = next(i for i, step in enumerate(e.sink.steps) if any(row.rid == "long" for row in step))
    # 1500 tokens in chunks of 128 are at least 12 rounds, and the stream decodes in each.
    assert sum(any(row.rid == "stream" for row in step) for step in e.sink.steps[:first_of_long]) >= 11


def test_an_end_token_ends_the_answer_and_is_not_shown(model: Path) -> None:
    ids = greedy_ids(model, prompt(30), 8)
    end = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    with RunningEngine(model, text=ForcedText(eos_ids=frozenset({ids[end]}))) as e:
        answer = e.ask("a", prompt(30), 8)
        assert (answer.finish, answer.ids) == ("stop", ids[:end])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == end + 1
        going_on = e.ask("b", prompt(30), 8, Sampling(temperature=0.0, ignore_eos=True))
        assert (going_on.finish, going_on.ids) == ("length", [i for i in ids if i != ids[end]])
        held_off = e.ask("c", prompt(30), 8, Sampling(temperature=0.0, min_tokens=end + 2))
        assert held_off.usage is not None
        assert held_off.usage.completion_tokens >= end + 2
        assert ids[end] not in held_off.ids[: end + 1]


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(model: Path) -> None:
    ids = greedy_ids(model, prompt(30), 8)
    end = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    with running(model) as e:
        answer = e.ask("a", prompt(30), 8, stops=(f"{ids[end]} ",))
        e.settle()
    assert (answer.finish, answer.stop_string, answer.ids) == ("stop", f"{ids[end]} ", ids[:end])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == end + 1


def test_real_text_comes_in_pieces_that_add_up(model: Path) -> None:
    with RunningEngine(model) as e:
        whole = e.ask("a", prompt(40), 30)
        stop = whole.text[5:8]
        cut = e.ask("b", prompt(40), 30, stops=(stop,))
    ids = greedy_ids(model, prompt(40), 30)
    assert_same_greedy(model, prompt(40), e.engine._text.decode(ids), whole.text)  # type: ignore[attr-defined]
    assert (cut.finish, cut.text) == ("stop", whole.text[: whole.text.index(stop)])


def test_cancelled_while_waiting_in_prefill_or_decoding_ends_with_one_row_and_then_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, max_batch=1) as e:
        decoding = e.submit("decoding", prompt(5), 10_000)
        waiting = e.submit("waiting", prompt(6), 5)
        while len(decoding.rows) < 3:
            time.sleep(0.001)
        e.engine.cancel("waiting")
        assert waiting.over.wait(10)
        e.engine.cancel("decoding")
        assert decoding.over.wait(10)
        gate = Gate(monkeypatch)
        prefilling = e.submit("prefilling", prompt(2000), 5)
        gate.let(3)
        e.engine.cancel("prefilling")
        gate.open()
        assert prefilling.over.wait(10)
        e.engine.cancel("never heard of")
        e.settle()
        assert e.ask("next", prompt(7), 3).finish == "length"
    assert [a.finish for a in (decoding, waiting, prefilling)] == ["cancelled"] * 3
    assert waiting.usage is not None
    assert (waiting.usage.prompt_tokens, waiting.usage.completion_tokens) == (6, 0)
    assert decoding.usage is not None
    assert decoding.usage.completion_tokens == len(decoding.rows) - 1
    assert prefilling.text == ""


def test_several_choices_share_a_request_and_differ_by_their_draws(model: Path) -> None:
    with running(model) as e:
        e.ask("a", prompt(20), 12, Sampling(temperature=1.0, seed=7, n=3))
        choices = [e.sink.of("a", i) for i in range(3)]
        assert all(choice.over.wait(30) for choice in choices)
    assert len({choice.text for choice in choices}) == 3
    assert all(choice.finish == "length" for choice in choices)


def test_a_seed_gives_the_same_answer_alone_and_in_company(model: Path) -> None:
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=1234)
    with running(model) as e:
        alone = e.ask("alone", prompt(33), 16, drawn)
        others = [e.submit(f"o{i}", prompt(20 + i), 10_000, Sampling(temperature=1.0)) for i in range(3)]
        while not all(other.rows for other in others):
            time.sleep(0.001)
        again = e.ask("again", prompt(33), 16, drawn)
        other_seed = e.ask("other", prompt(33), 16, Sampling(temperature=0.9, top_p=0.95, seed=1235))
        for i in range(3):
            e.engine.cancel(f"o{i}")
        assert all(answer.over.wait(30) for answer in others)
    assert any(len(step) > 2 for step in e.sink.steps), "nothing was batched"
    assert alone.text == again.text
    assert alone.text != other_seed.text


def test_unseeded_answers_differ(model: Path) -> None:
    with running(model) as e:
        texts = {e.ask(f"r{i}", prompt(33), 16, Sampling(temperature=1.0)).text for i in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0, presence_penalty=100.0), Sampling(temperature=0.0, frequency_penalty=100.0)]
)
def test_a_heavy_penalty_keeps_tokens_from_coming_twice(model: Path, sampling: Sampling) -> None:
    with running(model) as e:
        penalized = e.ask("a", prompt(20), 40, sampling)
        plain = e.ask("b", prompt(20), 40)
    assert len(set(penalized.ids)) == 40
    assert len(set(plain.ids)) < 40
    assert penalized.ids[0] == plain.ids[0], "the prompt's tokens were penalized"


def test_logit_bias_forces_and_forbids(model: Path) -> None:
    with running(model) as e:
        forced = e.ask("a", prompt(20), 5, Sampling(temperature=0.0, logit_bias={123: 100.0}))
        first = e.ask("b", prompt(20), 1).ids[0]
        forbidden = e.ask("c", prompt(20), 20, Sampling(temperature=0.0, logit_bias={first: -100.0}))
    assert forced.ids == [123] * 5
    assert first not in forbidden.ids


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias={100_000: 1.0}),
        Sampling(logit_bias={-1: 1.0}),
        Sampling(repetition_penalty=0.0),
        Sampling(temperature=-1.0),
    ],
)
def test_impossible_sampling_is_the_requests_own_error(model: Path, sampling: Sampling) -> None:
    with running(model) as e:
        answer = e.ask("a", prompt(20), 5, sampling)
        assert e.ask("b", prompt(20), 5).finish == "length"
    assert answer.error is not None
    assert answer.error[0] == Code.BAD_REQUEST


@pytest.mark.parametrize("ids", [[], [5, -1], [5, 100_000]])
def test_token_ids_the_model_does_not_have_are_the_requests_own_error(model: Path, ids: list[int]) -> None:
    with running(model) as e:
        answer = e.ask("a", ids, 5)
        assert e.ask("b", prompt(20), 5).finish == "length"
    assert answer.error is not None
    assert answer.error[0] == Code.BAD_REQUEST


def test_a_request_that_cannot_be_taken_does_not_take_the_others_with_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ForcedText()
    with RunningEngine(model, text=text) as e:
        stream = ForcedText.stream
        monkeypatch.setattr(
            ForcedText, "stream", lambda self, ids, stops: 1 / 0 if len(ids) == 13 else stream(self, ids, stops)
        )
        good = e.submit("good", prompt(30), 50)
        bad = e.ask("bad", prompt(13), 5)
        assert good.over.wait(20)
    assert bad.error is not None
    assert bad.error[0] == Code.INTERNAL
    assert good.finish == "length"


def test_an_idle_engine_uses_no_cpu(model: Path) -> None:
    with running(model) as e:
        e.ask("a", prompt(20), 5)
        e.settle()
        engine_thread = e.engine._thread.native_id
        before = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}
        time.sleep(1.0)
        after = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}
    assert engine_thread is not None
    assert after[engine_thread] - before[engine_thread] < 0.025, "two ticks of the clock"


def test_stopping_tells_everyone_and_leaves_nothing_running(model: Path) -> None:
    with running(model, max_batch=1) as e:
        answers = [e.submit("a", prompt(900), 10_000), e.submit("b", prompt(9), 5)]
        time.sleep(0.05)
        e.engine.stop(10.0)
        assert all(answer.over.wait(1) for answer in answers)
    assert {answer.error[0] for answer in answers if answer.error} == {Code.SHUTTING_DOWN}


def test_the_beat_shows_progress_and_what_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        gate = Gate(monkeypatch)
        before = e.engine.beat().progress
        answer = e.submit("a", prompt(300), 400)
        gate.let(2)  # the first is told of before the second
        assert e.engine.beat().running == 1
        gate.open()
        assert answer.over.wait(60)
        e.settle()
        assert e.engine.beat().progress - before >= 699
        assert e.engine.beat().kv_bytes == 0
