"""A prompt that is being scored holds KV like any other: when memory is critical it gives it up, and is scored again later."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant, ModelRef, Trim
from tests.stands.models import tiny_model
from tests.stands.sink import GREEDY, Answer, ForcedText, RecordingSink
from worker.job import Job, LoadSpec
from worker.meter import Meter
from worker.scheduler import Scheduler
from worker.start_up import bring_up

PROMPT = tuple(random.Random(3).choices(range(10, 400), k=300))


def scoring(path: Path) -> tuple[Scheduler, Answer]:
    """An engine without a thread, in the middle of scoring a prompt."""
    sink = RecordingSink()
    spec = LoadSpec(ModelRef(id="tiny", path=str(path), context=0), cache=CacheGrant(block=16), settings={"self_check": False})
    scheduler = bring_up(spec, ForcedText(), sink, Meter(), lambda *_: None)[0]
    scheduler.handle(Job("r", PROMPT, GREEDY, 2, logprobs=1, echo="(the prompt)"))
    scheduler.step()
    return scheduler, sink.of("r")


def finish(scheduler: Scheduler, answer: Answer) -> list[tuple[object, object]]:
    for _ in range(100):
        scheduler.step()
    assert answer.finish == "length"
    return [(entry["id"], entry["logprob"]) for row in answer.rows for entry in row.logprobs or ()]


def test_it_gives_its_kv_up_when_memory_is_critical_and_says_the_same_when_it_was_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.arrivals.RESTORE_SLICE_S", 0.0)  # a chunk a step
    path = tiny_model(tmp_path / "tiny")
    undisturbed = finish(*scoring(path))
    scheduler, answer = scoring(path)
    arrivals = scheduler._arrivals
    scheduler.handle(Trim(level="hard", target_bytes=1 << 40))
    assert arrivals._restoring is not None, "short memory leaves it what it has: it would begin anew each time"
    scheduler.handle(Trim(level="critical", target_bytes=1 << 40))
    for _ in range(3):
        scheduler.step()
        assert arrivals._restoring is None and len(arrivals) == 1 and not answer.rows, "nor does it begin again at once"
    assert scheduler.patience_s, "and it does not wait in a hurry"
    scheduler._parking.lift()
    assert finish(scheduler, answer) == undisturbed
    assert len(undisturbed) == len(PROMPT) + 2
