"""Answers that are put aside in the middle and go on later: nothing of what they say tells it."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant, Grant, Sampling
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.families import family_model
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import GREEDY, Answer, ForcedText, Gate, NumberStream, RunningEngine
from worker import parking
from worker.admission import ANSWER_TOKENS, Admission, KvCost
from worker.appetite import Appetite
from worker.arrivals import claim
from worker.job import Job
from worker.lanes import Lane
from worker.restore import Restore, Restored
from worker.scoring import Scoring
from worker.sequence import Sequence
from worker.structured import compiled
from worker.text import Text
from worker.vocabulary import Vocabulary

BLOCK = 16
ALL = 1 << 40
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32
BATCH, NORMAL, INTERACTIVE = -1, 0, 1


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192)


@pytest.fixture(autouse=True)
def asking_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test is kept waiting, what is asked for again is more than before."""
    monkeypatch.setattr("worker.appetite.ASK_AGAIN_S", 3600.0)


def running(model: Path, store: Path | None = None, **more: object) -> RunningEngine:
    grant = CacheGrant(dir=None if store is None else str(store), hot_bytes=0 if store is None else 64 << 20, block=BLOCK)
    return RunningEngine(model, cache=grant, text=ForcedText(context=8192), **more)  # type: ignore[arg-type]


def finish(e: RunningEngine, gate: Gate, *answers: Answer) -> None:
    gate.open()
    assert all(answer.over.wait(60) for answer in answers)
    e.settle()


def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens of each chunk from now on."""
    chunks: list[int] = []
    original = Lane.prefill

    def noted(lane: Lane, chunk_tokens: int) -> int:
        chunks.append(original(lane, chunk_tokens))
        return chunks[-1]

    monkeypatch.setattr(Lane, "prefill", noted)
    return chunks


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_parked_answer_is_the_one_it_would_have_been(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(tmp_path / family, family)
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first, second = e.submit("first", prompt(40), 60), e.submit("second", prompt(90, 2), 60)
        gate.let(37)
        said = len(second.rows)
        assert 20 < said < 60
        chunks = prefilled(monkeypatch)
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
        beat = e.engine.beat()
    assert (beat.parks, beat.resumes, beat.parked) == (1, 1, 0)
    assert sum(chunks) <= BLOCK, "its blocks were there: only what follows the last one was computed again"
    for length, seed, answer in ((40, 1, first), (90, 2, second)):
        assert_same_greedy(model, prompt(length, seed), greedy_ids(model, prompt(length, seed), 60), answer.ids)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.cached) == (length, 60, 0)
        assert [row.tokens for row in answer.rows] == list(range(1, 61))


def test_without_a_cache_it_is_computed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        gate = Gate(monkeypatch)
        first, second = e.submit("first", prompt(40), 40), e.submit("second", prompt(90, 2), 40)
        gate.let(20)
        said = len(second.rows)
        chunks = prefilled(monkeypatch)
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
        assert e.engine.beat().resumes == 1
    assert sum(chunks) == 90 + said
    assert_same_greedy(model, prompt(90, 2), greedy_ids(model, prompt(90, 2), 40), second.ids)


def test_a_prompt_parked_in_the_middle_goes_on_from_its_last_block(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(10), 40)
        gate.let(2)
        second = e.submit("second", prompt(1000, 2), 8)
        chunks = prefilled(monkeypatch)
        gate.let(4)
        before = sum(chunks)
        assert 100 < before < 900
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
    assert sum(chunks) < 1000 + BLOCK
    assert second.cached == 0, "what it computed itself was not cached when it came"
    assert_same_greedy(model, prompt(1000, 2), greedy_ids(model, prompt(1000, 2), 8), second.ids)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.9, top_p=0.8, top_k=40, seed=11, xtc_probability=0.5, xtc_threshold=0.02),
        Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    ],
)
def test_draws_and_penalties_go_on_as_if_nothing_had_been(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    with running(model) as e:
        undisturbed = e.ask("alone", prompt(50), 40, sampling)
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first, second = e.submit("first", prompt(20), 60), e.submit("second", prompt(50), 40, sampling)
        gate.let(25)
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
        assert e.engine.beat().resumes == 1
    assert second.ids == undisturbed.ids


def test_several_answers_of_one_request_are_parked_one_by_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(temperature=1.0, seed=3, n=3)

    def ask(e: RunningEngine) -> list[Answer]:
        e.submit("many", prompt(50), 30, sampling)
        return [e.sink.of("many", choice) for choice in range(3)]

    with running(model, tmp_path / "store") as e:
        undisturbed = ask(e)
        assert all(answer.over.wait(60) for answer in undisturbed)
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        answers = ask(e)
        gate.let(20)
        e.engine.trim("hard", ALL)
        finish(e, gate, *answers)
        beat = e.engine.beat()
    assert (beat.parks, beat.resumes) == (2, 2)
    assert [answer.ids for answer in answers] == [answer.ids for answer in undisturbed]


def test_logprobs_and_the_score_of_the_prompt_are_said_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(rid: str) -> Job:
        return Job(rid, tuple(prompt(30)), GREEDY, 24, logprobs=2, echo="(the prompt)", submitted_at=time.monotonic())

    with running(model) as e:
        e.engine.submit(scored("alone"))
        undisturbed = e.sink.of("alone")
        assert undisturbed.over.wait(30)
    scored_chunks: list[tuple[int, int]] = []
    score = Scoring._score
    monkeypatch.setattr(
        Scoring, "_score", lambda scoring, start, end: (scored_chunks.append((start, end)), score(scoring, start, end))
    )
    with running(model) as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(20), 60)
        gate.let(2)
        e.engine.submit(scored("second"))
        second = e.sink.of("second")
        gate.let(20)
        assert 0 < len(second.rows) < 24
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
        assert e.engine.beat().resumes == 1

    def entries(answer: Answer) -> list[dict[str, object]]:
        return [entry for row in answer.rows for entry in row.logprobs or ()]

    assert [start for start, _ in scored_chunks] == sorted({start for start, _ in scored_chunks}), "scored once"
    assert second.text == undisturbed.text
    assert [entry["id"] for entry in entries(second)] == [entry["id"] for entry in entries(undisturbed)]
    assert len(entries(second)) == 30 + 24
    for ours, theirs in zip(entries(second), entries(undisturbed), strict=True):
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


def test_a_grammar_is_followed_from_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "tiny")
    text = Text.open(model)
    matcher = compiled(
        Vocabulary(text.tokenizer, text.vocab_size, text.eos_ids), {"type": "regex", "regex": "([a-f]{3}-[0-9]{2};){6}"}
    )

    def held_to_it(rid: str, min_tokens: int = 0) -> Job:
        sampling = Sampling(temperature=0.0, min_tokens=min_tokens)
        return Job(rid, tuple(prompt(40)), sampling, 80, matcher=matcher, submitted_at=time.monotonic())

    with RunningEngine(model) as e:
        e.engine.submit(held_to_it("alone"))
        undisturbed = e.sink.of("alone")
        assert undisturbed.over.wait(30)
    with RunningEngine(model, cache=CacheGrant(dir=str(tmp_path / "store"), hot_bytes=1 << 20, block=BLOCK)) as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(20), 60)
        e.engine.submit(held_to_it("second", min_tokens=5))
        second = e.sink.of("second")
        gate.let(16)
        assert 3 < len(second.rows) < len(undisturbed.rows)
        e.engine.trim("hard", ALL)
        finish(e, gate, first, second)
        assert e.engine.beat().resumes == 1
    assert (second.finish, second.text) == ("stop", undisturbed.text)


def test_a_stop_string_whose_beginning_is_held_back_still_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "tiny")
    with RunningEngine(model) as e:
        whole = e.ask("alone", prompt(40), 40)
        stop = whole.text[30:40]
        stopped = e.ask("stopped", prompt(40), 40, stops=(stop,))
        assert stopped.finish == "stop"
    for rounds in range(4, len(stopped.rows), 2):
        with RunningEngine(model) as e, pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            first, second = e.submit("first", prompt(20), 60), e.submit("second", prompt(40), 40, stops=(stop,))
            gate.let(rounds)
            e.engine.trim("hard", ALL)
            finish(e, gate, first, second)
            assert e.engine.beat().resumes == 1
        assert (second.text, second.finish, second.stop_string) == (stopped.text, "stop", stop)
        assert second.usage == stopped.usage


# ---------------------------------------------------------------------- who is parked, and for how long


def test_the_newest_of_the_least_urgent_goes_first_and_the_last_one_stays(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        gate = Gate(monkeypatch)
        asked = (("urgent", INTERACTIVE), ("old", BATCH), ("new", BATCH), ("normal", NORMAL))
        answers = {rid: e.submit(rid, prompt(30, seed), 80, priority=priority) for seed, (rid, priority) in enumerate(asked)}
        gate.let(10)
        left: list[set[str]] = []
        for target in (1, 1, ALL, ALL):
            e.engine.trim("hard", target)
            gate.let(2)
            left.append({row.rid for row in e.sink.steps[-1]})
        finish(e, gate, *answers.values())
    assert left == [{"urgent", "old", "normal"}, {"urgent", "normal"}, {"urgent"}, {"urgent"}]


def test_when_memory_is_critical_even_the_last_one_goes_and_comes_back_when_it_is_over(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "HOLD_S", 3600.0)
    passed_s, advance = [0.0], parking.Parking.advance
    monkeypatch.setattr(parking.Parking, "advance", lambda of, now: advance(of, now + passed_s[0]))
    with running(model) as e:
        gate = Gate(monkeypatch)
        only = e.submit("only", prompt(30), 40)
        gate.let(10)
        e.engine.trim("critical", 0)
        gate.open()
        wait_until(lambda: e.engine.beat().parked)
        said = len(only.rows)
        later = e.submit("later", prompt(5), 1)
        assert not later.over.wait(0.25) and len(only.rows) == said and e.engine.beat().kv_bytes == 0
        passed_s[0] = 3601.0
        assert only.over.wait(30) and later.over.wait(30)
    assert_same_greedy(model, prompt(30), greedy_ids(model, prompt(30), 40), only.ids)


def test_room_that_was_made_is_not_filled_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "HOLD_S", 60.0)
    with running(model) as e:
        gate = Gate(monkeypatch)
        first, second = e.submit("first", prompt(30), 60), e.submit("second", prompt(30, 2), 60)
        gate.let(10)
        e.engine.trim("hard", ALL)
        third = e.submit("third", prompt(5), 1)
        gate.let(30)
        assert not third.over.is_set()
        assert [{row.rid for row in step} for step in e.sink.steps[-25:]] == [{"first"}] * 25
        finish(e, gate, first, second, third)
    ends = [row.rid for step in e.sink.steps for row in step if row.finish is not None]
    assert ends[0] == "first"


def test_what_the_cache_has_lost_meanwhile_is_kept_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "HOLD_S", 0.2)
    in_ram_alone = CacheGrant(dir=None, hot_bytes=64 << 20, block=BLOCK)
    with RunningEngine(model, cache=in_ram_alone, text=ForcedText(context=8192)) as e:
        gate = Gate(monkeypatch)
        only = e.submit("only", prompt(200), 40)
        gate.let(20)
        e.engine.trim("critical", 0)
        finish(e, gate, only)
        assert e.engine.beat().resumes == 1
        assert e.ask("after", [*prompt(200), *only.ids, 7], 1).cached >= 240 // BLOCK * BLOCK - BLOCK


def test_a_prompt_that_is_being_restored_waits_as_well(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    original = Restore.advance

    def slow(restore: Restore, until: float) -> Restored | None:
        return original(restore, until) if may_end.is_set() else None

    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(30), 40)
        gate.let(5)
        monkeypatch.setattr(Restore, "advance", slow)
        second = e.submit("second", prompt(100, 2), 4)
        gate.let(3)
        e.engine.trim("hard", ALL)
        may_end.set()
        gate.let(10)
        assert not second.rows
        finish(e, gate, first, second)
        assert e.engine.beat().parks == 0, "it had not begun"
    assert_same_greedy(model, prompt(100, 2), greedy_ids(model, prompt(100, 2), 4), second.ids)


def test_what_goes_on_sets_aside_room_for_what_is_still_to_come() -> None:
    job = Job("r", tuple(prompt(50)), GREEDY, 3000)
    sequence = Sequence(job, 0, NumberStream(()), frozenset(), None)
    assert claim(sequence).tokens == 50 + ANSWER_TOKENS
    for token in range(2500):
        sequence.take(token, 0.0)
    assert claim(sequence).tokens == 2550
    sequence.parked()
    assert claim(sequence).tokens == 50 + 3000
    assert (sequence.parks, sequence.held_tokens) == (1, 0)


def test_a_demand_without_a_number_takes_what_is_cached_and_one_answer_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        answers = [e.submit(f"r{i}", prompt(40, i), 40) for i in range(3)]
        gate.let(10)
        left: list[int] = []
        for _ in range(4):
            e.engine.trim("hard", 0)
            gate.let(1)
            left.append(len(e.sink.steps[-1]))
        finish(e, gate, *answers)
    assert left == [2, 1, 1, 1]


def test_a_grant_that_shrinks_parks_what_does_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 2 * 512 * PER_TOKEN
    with running(model, kv_bytes=4 * row_bytes) as e:
        gate = Gate(monkeypatch)
        answers = [e.submit(f"r{i}", prompt(30, i), 100) for i in range(4)]
        gate.let_until(lambda: e.sink.steps and len(e.sink.steps[-1]) == 4)
        e.engine.grant(Grant(kv_bytes=2 * row_bytes))
        gate.let(1)
        e.engine.grant(Grant(kv_bytes=2 * row_bytes))  # as a supervisor answers who asks for more
        gate.let(20)
        assert {row.rid for row in e.sink.steps[-1]} == {"r0", "r1"}
        assert e.sink.wanted[0] == 4 * row_bytes
        finish(e, gate, *answers)
    for i, answer in enumerate(answers):
        assert_same_greedy(model, prompt(30, i), greedy_ids(model, prompt(30, i), 100), answer.ids)


def test_nobody_is_parked_while_memory_is_being_freed_for_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.appetite.SOON_S", 1e6)
    monkeypatch.setattr("worker.appetite.ANSWER_S", 0.0)
    row_bytes = 2 * 512 * PER_TOKEN
    with running(model, kv_bytes=2 * row_bytes) as e:
        gate = Gate(monkeypatch)
        answers = [e.submit(f"r{i}", prompt(30, i), 100) for i in range(2)]
        gate.let(10)
        e.engine.grant(Grant(kv_bytes=row_bytes, more_soon=True))
        gate.let(2 * parking.LOOK_EVERY_ROUNDS)
        assert {row.rid for row in e.sink.steps[-1]} == {"r0", "r1"}
        e.engine.grant(Grant(kv_bytes=row_bytes))
        gate.let(2)
        assert {row.rid for row in e.sink.steps[-1]} == {"r0"}, "no more will come"
        finish(e, gate, *answers)
        assert e.engine.beat().parks == 1


def test_answers_that_outgrow_what_was_set_aside_for_them_park_the_newest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.admission.ANSWER_TOKENS", 64)
    monkeypatch.setattr("worker.appetite.ANSWER_S", 0.0)  # nobody lends anything here
    row_bytes = 2 * 512 * PER_TOKEN
    with running(model, kv_bytes=2 * row_bytes + 1) as e:
        with e.at_once():
            answers = [e.submit(f"r{i}", prompt(150, i), 300) for i in range(2)]
        assert all(answer.over.wait(60) for answer in answers)
        e.settle()
        beat = e.engine.beat()
    assert (beat.parks, beat.resumes) == (1, 1)
    assert max(e.sink.wanted) > 2 * row_bytes
    ends = [row.rid for step in e.sink.steps for row in step if row.finish is not None]
    assert ends == ["r0", "r1"]
    for i, answer in enumerate(answers):
        assert_same_greedy(model, prompt(150, i), greedy_ids(model, prompt(150, i), 300), answer.ids)


def test_an_urgent_request_takes_the_place_of_a_batch_row_and_of_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tmp_path / "store", max_batch=2) as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(60), 60, priority=BATCH)
        normal = e.submit("normal", prompt(30, 2), 60)
        gate.let(10)
        urgent = [e.submit(f"urgent{i}", prompt(20, 3 + i), 4, priority=INTERACTIVE) for i in range(2)]
        gate.let(5)
        assert {row.rid for row in e.sink.steps[-1]} == {"normal", "urgent0"}
        finish(e, gate, batch, normal, *urgent)
        beat = e.engine.beat()
    assert (beat.parks, beat.resumes) == (1, 1)
    assert_same_greedy(model, prompt(60), greedy_ids(model, prompt(60), 60), batch.ids)


def test_a_batch_row_gives_up_its_memory_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.appetite.ANSWER_S", 0.0)
    claim_bytes = 2 * 1280 * PER_TOKEN
    with running(model, kv_bytes=claim_bytes + 1) as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(500), 300, priority=BATCH)
        gate.let(10)
        urgent = e.submit("urgent", prompt(500, 2), 300, priority=INTERACTIVE)
        finish(e, gate, batch, urgent)
        assert e.engine.beat().parks == 1
    ends = [row.rid for step in e.sink.steps for row in step if row.finish is not None]
    assert ends == ["urgent", "batch"]


def test_running_makes_nobody_older(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.line.AGING_S", 0.05)
    with running(model, max_batch=1) as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(30), 30, priority=BATCH)
        gate.let(10)
        time.sleep(0.2)  # as long as four levels of priority are worth
        urgent = e.submit("urgent", prompt(20, 3), 4, priority=INTERACTIVE)
        finish(e, gate, batch, urgent)
    ends = [row.rid for step in e.sink.steps for row in step if row.finish is not None]
    assert ends == ["urgent", "batch"]


def test_a_model_that_serves_one_at_a_time_parks_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(tmp_path / "llama4", "llama4")
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(60), 30, priority=BATCH)
        gate.let(12)
        urgent = e.submit("urgent", prompt(20, 3), 4, priority=INTERACTIVE)
        finish(e, gate, batch, urgent)
        assert e.engine.beat().resumes == 1
    ends = [row.rid for step in e.sink.steps for row in step if row.finish is not None]
    assert ends == ["urgent", "batch"]
    assert_same_greedy(model, prompt(60), greedy_ids(model, prompt(60), 30), batch.ids)


@pytest.mark.parametrize("at", [3, 14])
def test_where_a_draft_model_proposes_it_is_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    draft = {"draft_model": "itself", "draft_path": str(model), "num_draft_tokens": 3}
    with running(model, tmp_path / "store", settings=draft) as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(60), 60, priority=BATCH)
        gate.let(at)
        urgent = e.submit("urgent", prompt(20, 3), 4, priority=INTERACTIVE)
        finish(e, gate, batch, urgent)
        beat = e.engine.beat()
        assert beat.resumes == 1
    assert_same_greedy(model, prompt(60), greedy_ids(model, prompt(60), 60), batch.ids)
    told = [row.timings for answer in (batch, urgent) for row in answer.rows[-1:]]
    assert beat.draft["proposed"] == sum(t.draft_proposed or 0 for t in told if t is not None) > 0
    assert beat.draft["accepted"] == sum(t.draft_accepted or 0 for t in told if t is not None)


def test_nobody_is_parked_for_others_again_and_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, max_batch=1) as e:
        gate = Gate(monkeypatch)
        batch = e.submit("batch", prompt(30), 40, priority=BATCH)
        gate.let(3)
        urgent: list[Answer] = []
        for i in range(parking.MAX_PARKS + 2):
            urgent.append(e.submit(f"urgent{i}", prompt(5, i), 1, priority=INTERACTIVE))
            gate.let(6)
            assert urgent[-1].over.is_set() == (i < parking.MAX_PARKS)
        finish(e, gate, batch, *urgent)
        assert e.engine.beat().parks == parking.MAX_PARKS
    assert_same_greedy(model, prompt(30), greedy_ids(model, prompt(30), 40), batch.ids)


def test_a_parked_answer_can_be_cancelled_and_its_blocks_stay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tmp_path / "store") as e:
        gate = Gate(monkeypatch)
        first, second = e.submit("first", prompt(20), 60), e.submit("second", prompt(90, 2), 60)
        gate.let(15)
        said = list(second.ids)
        e.engine.trim("hard", ALL)
        gate.let(1)
        e.engine.cancel("second")
        gate.let(1)
        assert second.finish == "cancelled" and second.usage is not None
        assert second.usage.completion_tokens == len(said)
        finish(e, gate, first)
        beat = e.engine.beat()
        assert (beat.running, beat.waiting, beat.parked, beat.kv_bytes) == (0, 0, 0, 0)
        assert e.ask("after", [*prompt(90, 2), *said, 7], 1).cached >= (90 + len(said)) // BLOCK * BLOCK - BLOCK


# ---------------------------------------------------------------------- what is lent


def test_whoever_is_alone_is_served_at_once_and_says_what_it_takes(model: Path) -> None:
    small = 2 * 256 * PER_TOKEN
    with running(model, kv_bytes=small) as e:
        e.ask("prompt", prompt(1000), 2)
        wait_until(lambda: len(e.sink.wanted) > 1)
        assert e.sink.wanted == [2 * 1280 * PER_TOKEN, small], "and that nobody takes it any more"
        e.engine.grant(Grant(kv_bytes=2 * 1536 * PER_TOKEN))
        e.ask("answer", prompt(200), 1300)
        assert e.sink.wanted[2] == 2 * 1792 * PER_TOKEN, "it has outgrown what was set aside for it"


def test_what_was_lent_goes_back_when_it_was_not_needed_for_a_while(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_bytes = 2 * 1280 * PER_TOKEN
    with running(model, kv_bytes=claim_bytes, settings={"kv_loan_s": 0.4}) as e:
        gate = Gate(monkeypatch)
        answers = [e.submit(f"r{i}", prompt(500, i), 500) for i in range(2)]
        gate.let_until(lambda: e.sink.wanted)
        e.engine.grant(Grant(kv_bytes=3 * claim_bytes))
        gate.open()
        assert all(answer.over.wait(60) for answer in answers)
        wait_until(lambda: e.sink.wanted[-1] == claim_bytes)  # no less than what it was given to begin with
        said = list(e.sink.wanted)
        assert said == [2 * claim_bytes, 2 * claim_bytes, claim_bytes], "asked for once, given back twice"
        e.engine.grant(Grant(kv_bytes=claim_bytes))
        time.sleep(0.6)
        assert e.sink.wanted == said
        with e.at_once():
            answers = [e.submit(f"s{i}", prompt(500, i), 500) for i in range(2)]
        wait_until(lambda: len(e.sink.wanted) > len(said))  # it is not used any more until it is lent again
        assert e.sink.wanted[len(said)] == 2 * claim_bytes
        assert all(answer.over.wait(60) for answer in answers)
    assert max(len(step) for step in e.sink.steps[-400:]) == 1


def test_an_idle_engine_looks_soon_after_its_last_request_whether_it_needs_what_was_lent() -> None:
    said: list[int] = []
    appetite = Appetite(Admission(KvCost(()), 100, 1000), said.append, loan_s=30.0)  # pyright: ignore[reportArgumentType]
    now, needed = 50.0, 300
    appetite.granted(300, now)
    while not said and now < 200.0:
        if appetite.is_due(now):
            appetite.settle(needed, now)
        needed = 0  # the request ends right after the first look
        now += appetite.patience_s(now) or 0.0
    assert said == [100] and 80.0 <= now < 82.0


def test_what_was_asked_for_somebody_who_is_gone_is_taken_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_bytes = 2 * 1280 * PER_TOKEN
    with running(model, kv_bytes=claim_bytes) as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(500, 1), 500)
        gate.let_until(lambda: first.ids)
        second = e.submit("second", prompt(500, 2), 500)
        gate.let_until(lambda: e.sink.wanted)
        e.engine.cancel("second")
        gate.open()
        assert second.over.wait(20)
        wait_until(lambda: len(e.sink.wanted) > 1)
        assert e.sink.wanted[1:] == [claim_bytes]
        assert first.over.wait(60)
        alone = e.submit("alone", prompt(1500, 3), 400)
        wait_until(lambda: alone.ids)
        e.engine.cancel("alone")
        wait_until(lambda: len(e.sink.wanted) > 3)
        assert e.sink.wanted[2] > claim_bytes and e.sink.wanted[3:] == [claim_bytes], "an idle engine says so as well"


def test_a_need_that_stays_is_said_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.appetite.ASK_AGAIN_S", 5.0)
    said: list[int] = []
    appetite = Appetite(Admission(KvCost(()), 100, 1000), said.append)  # pyright: ignore[reportArgumentType]
    for now in (50.0, 54.0, 55.5, 57.0):
        appetite.ask(300, now)
    assert said == [300, 300]


def test_a_part_of_what_was_asked_for_leaves_the_rest_to_be_taken_back() -> None:
    said: list[int] = []
    appetite = Appetite(Admission(KvCost(()), 100, 1000), said.append, loan_s=30.0)  # pyright: ignore[reportArgumentType]
    appetite.ask(300, 50.0)
    appetite.granted(200, 51.0)
    assert appetite.has_asked and appetite.is_due(51.0)
    appetite.settle(250, 51.0)
    assert said == [300], "it is needed still"
    appetite.settle(150, 52.0)
    assert said == [300, 200] and not appetite.has_asked


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + patient_s(20)
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
