"""An engine under load, counted in tokens: streams go on while prompts are prefilled, unlike rows take no room for each other,
what does not fit waits or is refused, and what nobody wants any more costs nothing.
"""

import random
import time
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant, Code, Grant, Row
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import Answer, ForcedText, Gate, RunningEngine
from worker.lanes import Lane
from worker.scheduler import Scheduler

LONG = 1504
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(10, 400), k=length)


@pytest.fixture(autouse=True)
def asking_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test is kept waiting, what is asked for again is more than before."""
    monkeypatch.setattr("worker.appetite.ASK_AGAIN_S", 3600.0)


def running(model: Path, **more: object) -> RunningEngine:
    return RunningEngine(model, text=ForcedText(context=8192), **more)  # type: ignore[arg-type]


def wait_for(answer: Answer, rows: int) -> None:
    until = time.monotonic() + patient_s(30)
    while len(answer.rows) < rows and not answer.over.is_set():
        assert time.monotonic() < until
        time.sleep(0.001)


class Diary:
    """What an engine did, in order: prompt tokens prefilled, and the requests whose rows went out."""

    def __init__(self, e: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[int | frozenset[str]] = []
        prefill, rows = Lane.prefill, e.sink.rows

        def noted_prefill(lane: Lane, chunk_tokens: int) -> int:
            done = prefill(lane, chunk_tokens)
            self.entries.append(done)
            return done

        def noted_rows(sent: list[Row]) -> None:
            self.entries.append(frozenset(row.rid for row in sent))
            rows(sent)

        monkeypatch.setattr(Lane, "prefill", noted_prefill)
        monkeypatch.setattr(e.sink, "rows", noted_rows)

    def prefilled(self) -> int:
        return sum(entry for entry in self.entries if isinstance(entry, int))

    def between_rows(self, rid: str) -> list[int]:
        """Prompt tokens prefilled between each two rows of that request."""
        counts, since = [], None
        for entry in self.entries:
            if isinstance(entry, int):
                since = None if since is None else since + entry
            elif rid in entry:
                counts += [] if since is None else [since]
                since = 0
        return counts


def test_while_a_long_prompt_is_prefilled_every_stream_gets_its_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        streams = {f"s{i}": e.submit(f"s{i}", prompt(30 + i), 2000) for i in range(3)}
        for stream in streams.values():
            wait_for(stream, 3)
        diary = Diary(e, monkeypatch)
        long = e.submit("long", prompt(LONG), 8)
        assert long.over.wait(60)
        for rid in streams:
            e.engine.cancel(rid)
        e.settle()
    until_first = next(i for i, entry in enumerate(diary.entries) if not isinstance(entry, int) and "long" in entry)
    for rid in streams:
        assert sum(not isinstance(entry, int) and rid in entry for entry in diary.entries[:until_first]) >= 11
        assert max(diary.between_rows(rid)) <= 192
    assert_same_greedy(model, prompt(LONG), greedy_ids(model, prompt(LONG), 8), long.ids)


def test_a_short_prompt_is_answered_while_a_long_one_is_prefilled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        gate = Gate(monkeypatch)
        long = e.submit("long", prompt(4000), 4)
        gate.let(1)
        short = e.submit("short", prompt(40), 4)
        gate.let(5)
        assert short.rows and not long.rows
        gate.open()
        assert long.over.wait(60) and short.over.wait(60)
    for length, answer in ((4000, long), (40, short)):
        assert_same_greedy(model, prompt(length), greedy_ids(model, prompt(length), 4), answer.ids)


def test_a_flow_of_short_prompts_does_not_starve_a_long_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model) as e:
        gate = Gate(monkeypatch)
        long = e.submit("long", prompt(4000), 4)
        gate.let(1)
        shorts = [e.submit(f"s{i}", prompt(200, i), 1) for i in range(60)]
        gate.open()
        assert long.over.wait(60)
        assert all(answer.over.wait(60) for answer in shorts)
    order = [row.rid for step in e.sink.steps for row in step if row.seq == 0]
    assert 5 <= order.index("long") <= 45, "both got on"


def test_one_long_row_beside_seven_short_ones_takes_no_more_than_their_sum_and_a_little(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios: list[float] = []
    original = Scheduler._round

    def measured(scheduler: Scheduler) -> None:
        original(scheduler)
        sequences = scheduler._lanes.sequences()
        if len(sequences) == 8 and not scheduler._lanes.prefilling():
            ratios.append(scheduler._lanes.cache_bytes / (PER_TOKEN * sum(len(s.tokens) for s in sequences)))

    monkeypatch.setattr(Scheduler, "_round", measured)
    lengths = {4000: 60, **{50 + i: 150 for i in range(7)}}  # the short ones have said much before the long one begins
    with running(model) as e:
        with e.at_once():
            answers = [e.submit(f"r{length}", prompt(length), tokens) for length, tokens in lengths.items()]
        assert all(answer.over.wait(60) for answer in answers)
    assert len(ratios) >= 20
    assert max(ratios) <= 1.4
    for (length, tokens), answer in zip(lengths.items(), answers, strict=True):
        assert_same_greedy(model, prompt(length), greedy_ids(model, prompt(length), tokens), answer.ids)


def test_lanes_whose_rows_are_alike_become_one_and_nobody_notices(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absorbed: list[int] = []
    absorb = Lane.absorb
    monkeypatch.setattr(Lane, "absorb", lambda lane, other: (absorbed.append(other.rows), absorb(lane, other)))
    with running(model) as e:
        gate = Gate(monkeypatch)
        answers = [e.submit("a", prompt(400), 80)]
        gate.let(1)
        answers.append(e.submit("b", prompt(20), 80))
        gate.open()
        assert all(answer.over.wait(30) for answer in answers)
    assert absorbed == [1]
    assert any(len(step) == 2 for step in e.sink.steps)
    for length, answer in zip((400, 20), answers, strict=True):
        assert_same_greedy(model, prompt(length), greedy_ids(model, prompt(length), 80), answer.ids)


def test_sixteen_at_once_of_all_lengths_answer_as_each_would_alone_in_three_rounds(model: Path) -> None:
    lengths = [5, 900, 33, 2500, 64, 65, 300, 12, 1504, 7, 128, 700, 40, 257, 90, 1]
    expected = {length: greedy_ids(model, prompt(length), 12) for length in lengths}
    for round_ in range(3):
        with running(model, cache=CacheGrant(hot_bytes=64 << 20, block=16)) as e:
            order = random.Random(round_).sample(lengths, k=len(lengths))
            answers = {length: e.submit(f"r{length}", prompt(length), 12) for length in order}
            assert all(answer.over.wait(60) for answer in answers.values())
            e.settle()
            assert e.engine.beat().kv_bytes == 0
        for length, answer in answers.items():
            assert_same_greedy(model, prompt(length), expected[length], answer.ids)


def test_a_prompt_nobody_waits_for_costs_at_most_one_more_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, cache=CacheGrant(hot_bytes=64 << 20, block=16)) as e:
        diary = Diary(e, monkeypatch)
        gate = Gate(monkeypatch)
        cached: list[int] = []
        for i in range(5):
            before = diary.prefilled()
            gone = e.submit(f"gone{i}", prompt(4000), 4)
            gate.let(2)
            e.engine.cancel(f"gone{i}")
            after = e.submit(f"after{i}", prompt(1, seed=i + 2), 1)
            gate.let(2)
            assert gone.over.wait(10) and after.over.wait(10)
            assert diary.prefilled() - before <= 2 * 256 + 1
            cached.append(gone.cached)
        gate.open()
    assert cached == [0, 512, 1024, 1536, 2048], "each goes on where the one before was stopped"


def test_what_does_not_fit_beside_the_others_waits_and_asks_for_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_bytes = 2 * 1280 * PER_TOKEN  # 500 + 500 tokens and some to grow
    with running(model, kv_bytes=claim_bytes + 1) as e:
        gate = Gate(monkeypatch)
        first = e.submit("first", prompt(500), 500)
        gate.let_until(lambda: first.rows)
        second = e.submit("second", prompt(501), 499)
        third = e.submit("third", prompt(502), 498)
        gate.let(2)
        assert e.sink.wanted == [2 * claim_bytes]
        e.engine.grant(Grant(kv_bytes=2 * claim_bytes))
        gate.open()
        assert all(answer.over.wait(60) for answer in (first, second, third))
    assert max(len(step) for step in e.sink.steps) == 2
    assert [answer.finish for answer in (first, second, third)] == ["length"] * 3


def test_without_more_memory_they_come_one_after_another(model: Path) -> None:
    with running(model, kv_bytes=1) as e:
        answers = [e.submit(f"r{i}", prompt(50, i), 20) for i in range(3)]
        assert all(answer.over.wait(60) for answer in answers)
    assert max(len(step) for step in e.sink.steps) == 1


def test_what_could_never_fit_is_refused_with_the_numbers(model: Path) -> None:
    with running(model, settings={"kv_ceiling_bytes": 2 << 20}) as e:
        refused = e.ask("refused", prompt(3000), 100)
        served = e.ask("served", prompt(300), 10)
    assert refused.error is not None
    assert refused.error[0] == Code.KV_TOO_LARGE
    assert "3100 tokens" in refused.error[1] and "2 MiB" in refused.error[1]
    assert served.finish == "length"
