"""An engine whose prefill turns are leased, and whose neighbours decode: what it does without one, how it passes one on."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from supervisor.protocol import Activity, AskTurn, GiveTurn, Grant, Turn
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import GREEDY, ForcedText, RunningEngine
from worker.job import Job
from worker.turn import PrefillTurn

LEASED = {"prefill_turns": True}
LONG = [(7 * i) % 400 for i in range(1000)]
CHUNK_TOKENS, BUSY_TOKENS = 256, 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(autouse=True)
def asking_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test is kept waiting, whoever asks again has another reason."""
    monkeypatch.setattr("worker.turn.ASK_AGAIN_S", 3600.0)


def asked(e: RunningEngine, times: int = 1) -> None:
    until = time.monotonic() + patient_s(20)
    while sum(isinstance(message, AskTurn) for message in e.sink.told) < times:
        assert time.monotonic() < until, e.sink.told
        time.sleep(0.005)


def turns(e: RunningEngine) -> list[AskTurn | GiveTurn]:
    return [message for message in e.sink.told if not isinstance(message, Activity)]


def test_without_a_turn_a_prompt_waits_at_no_cost_and_goes_on_with_one(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        answer = e.submit("r", LONG, 3)
        asked(e)
        before_s = time.process_time()
        assert not answer.over.wait(0.5) and not answer.rows
        assert time.process_time() - before_s < 0.25, "it must not spin"
        e.engine.grant(Turn(turn=1, state="yours"))
        assert answer.over.wait(20)
        assert turns(e) == [AskTurn(priority=0)]
        e.ask("again", LONG[::-1], 3)
        assert len(turns(e)) == 1, "as long as nobody wants it, it keeps the turn"
        assert e.engine.beat().turns_passed_on == 0


def test_a_turn_that_others_want_is_passed_on_after_each_chunk(model: Path) -> None:
    with RunningEngine(model, text=ForcedText()) as e:
        alone = e.ask("r", LONG, 3).ids
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        answer = e.submit("r", LONG, 3)
        for turn in range(1, 5):
            asked(e, turn)
            with e.at_once():
                e.engine.grant(Turn(turn=turn, state="yours"))
                e.engine.grant(Turn(turn=turn, state="wanted"))
        assert answer.over.wait(20)
        e.settle()
        gives = [GiveTurn(turn=turn) for turn in range(1, 5)]
        assert turns(e) == [message for give in gives for message in (AskTurn(priority=0), give)]
        assert answer.ids == alone
        assert e.engine.beat().turns_passed_on == 4


def test_without_a_turn_what_decodes_goes_on(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        e.engine.grant(Turn(turn=1, state="yours"))
        stream = e.submit("stream", LONG[:20], 10_000)
        while len(stream.rows) < 3:
            time.sleep(0.005)
        e.engine.grant(Turn(turn=1, state="wanted"))  # there is no chunk to wait for
        newcomer = e.submit("newcomer", LONG, 3)
        asked(e)
        seen = len(stream.rows)
        while len(stream.rows) < seen + 20:
            time.sleep(0.005)
        assert not newcomer.rows and not stream.over.is_set()
        e.engine.grant(Turn(turn=2, state="yours"))
        assert newcomer.over.wait(20)
        assert turns(e) == [GiveTurn(turn=1), AskTurn(priority=0)]


def test_an_idle_engine_gives_the_turn_back_at_once_and_one_that_lost_it_asks_anew(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        e.engine.grant(Turn(turn=1, state="yours"))
        e.engine.grant(Turn(turn=1, state="wanted"))
        until = time.monotonic() + patient_s(5)
        while not turns(e):
            assert time.monotonic() < until
            time.sleep(0.005)
        e.engine.grant(Turn(turn=2, state="yours"))
        e.engine.grant(Turn(turn=2, state="lost"))
        e.submit("r", LONG, 3)
        asked(e)
        assert turns(e) == [GiveTurn(turn=1), AskTurn(priority=0)]


def test_a_request_that_waits_for_a_turn_can_be_cancelled(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        answer = e.submit("r", LONG, 3)
        asked(e)
        e.engine.cancel("r")
        assert answer.over.wait(5) and answer.finish == "cancelled"
        e.settle()


def test_scoring_a_prompt_needs_a_turn_too(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        e.engine.submit(Job("r", tuple(LONG[:300]), GREEDY, 1, echo="", logprobs=0, submitted_at=time.monotonic()))
        asked(e)
        progress = e.engine.beat().progress
        time.sleep(0.2)
        assert e.engine.beat().progress == progress
        e.engine.grant(Turn(turn=1, state="yours"))
        assert e.sink.of("r").over.wait(20)


def test_the_priority_of_the_most_urgent_request_goes_with_the_asking(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        e.submit("r", LONG, 3, priority=2)
        asked(e)
        assert turns(e) == [AskTurn(priority=2)]


def test_it_asks_again_when_something_more_urgent_has_come_and_only_then(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(), settings=LEASED) as e:
        batch = e.submit("batch", LONG, 1, priority=-1)
        asked(e)
        urgent = e.submit("urgent", LONG[:50], 1, priority=1)
        asked(e, 2)
        normal = e.submit("normal", LONG[:40], 1)
        time.sleep(0.2)
        assert turns(e) == [AskTurn(priority=-1), AskTurn(priority=1)]
        e.engine.grant(Turn(turn=1, state="yours"))
        assert all(answer.over.wait(20) for answer in (batch, urgent, normal))


def test_it_asks_again_after_a_while_as_a_message_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.turn.ASK_AGAIN_S", 5.0)
    said: list[AskTurn | GiveTurn] = []
    turn = PrefillTurn(said.append, leased=True)
    asked_after = [(turn.has(0, now), len(said)) for now in (100.0, 104.9, 105.0, 109.9)]
    assert asked_after == [(False, 1), (False, 1), (False, 2), (False, 2)]


def test_chunks_are_small_while_a_neighbour_decodes_whatever_else_is_granted(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "worker.scheduler")

    def chunks() -> list[int]:
        found = [record.args[0] for record in caplog.records if record.msg.startswith("prefilled")]  # pyright: ignore[reportArgumentType, reportIndexIssue, reportOptionalSubscript]
        caplog.clear()
        return [count for count in found if isinstance(count, int)]

    with RunningEngine(model, text=ForcedText()) as e:
        e.ask("alone", LONG, 2)
        assert max(chunks()) == CHUNK_TOKENS
        e.engine.grant(Grant(neighbours_decoding=1))
        e.engine.grant(Grant(hot_bytes=0))  # says nothing of neighbours
        e.ask("beside", LONG[::-1], 2)
        assert max(chunks()) <= BUSY_TOKENS
        e.engine.grant(Grant(neighbours_decoding=0))
        e.ask("alone again", LONG, 2)
        assert max(chunks()) == CHUNK_TOKENS


def test_that_something_decodes_is_said_at_its_beginning_and_its_end(model: Path) -> None:
    with RunningEngine(model, text=ForcedText()) as e:
        e.ask("r", LONG[:40], 5)
        e.settle()
        assert e.sink.told == [Activity(decoding=True), Activity(decoding=False)]
