"""Days of a scheduler, with every kind of lane: whatever happens to requests, in any order, each ends once and rightly, and all
that can be asked of the engine can be asked at any moment.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.protocol import CacheGrant, Grant, Grants, ModelRef, Sampling, Trim, Turn
from tests.stands.families import family_model
from tests.stands.models import tiny_model
from tests.stands.sink import GREEDY, ForcedText, RecordingSink

import mlx.core as mx  # isort: skip  # the stand has loaded the fast library

from worker import start_up
from worker.job import Job, LoadSpec
from worker.mailbox import Cancel, Probe
from worker.meter import Meter
from worker.sequence import Stage

BLOCK = 16
HOT_BYTES = 8 << 20
TINY_KV_BYTES = 2 * 256 * 4096
ALL = 1 << 40
DAYS, EVENTS = 4, 40
LENGTHS = (1, 2, 15, 33, 100, 300)
ANSWERS = (1, 2, 30)

KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("llama", {}),
    "rotating": ("gemma3_text", {}),
    "state": ("qwen3_next", {}),
    "state alone": ("mamba2", {}),
    "lists": ("deepseek_v32", {}),
    "chunked": ("llama4", {}),
    "a class of its own": ("deepseek_v41", {}),
    "quantized": ("llama", {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}),
    "quantized later": ("llama", {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}),
    "drafts": ("llama", {"draft_model": "shallow", "num_draft_tokens": 3}),
    "quantized, with drafts": (
        "llama",
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40, "draft_model": "shallow", "num_draft_tokens": 3},
    ),
}


class BrokenOnce(RuntimeError):
    """What a step is made to raise."""


class Day:
    """What an engine thread does, without the thread: events by chance, and after each everything is asked."""

    def __init__(self, path: Path, wished: dict[str, object], seed: int, break_next: list[bool]) -> None:
        self.chance = random.Random(seed)
        self.sink, self.meter = RecordingSink(), Meter()
        settings = {**wished, "self_check": False, "prefill_turns": True}
        cache = CacheGrant(hot_bytes=HOT_BYTES, block=BLOCK)
        spec = LoadSpec(ModelRef(id="tiny", path=str(path), context=0), 3, Grants(), cache, settings)
        self.scheduler = start_up.bring_up(spec, ForcedText(), self.sink, self.meter, lambda *_: None)[0]
        self.jobs: dict[str, Job] = {}
        self.cancelled: set[str] = set()
        self.exposed: set[str] = set()
        """They were there when a step broke."""
        self._break_next = break_next
        self._turns = 0

    def live(self) -> None:
        events = [self.submit, self.submit, self.submit, self.step, self.step, self.step, self.cancel, self.break_a_step]
        events += [self.trim, self.trim, self.grant, self.resize_the_hot_cache, self.change_turns, self.change_turns]
        for _ in range(EVENTS):
            self.chance.choice(events)()
            self.ask()
        self.end()

    # ------------------------------------------------------------------ what happens

    def submit(self) -> None:
        rid, pick = f"r{len(self.jobs)}", self.chance.choice
        choices = pick([None, None, 2])
        logprobs, echo = pick([(None, None), (None, None), (1, ""), (1, None)])
        sampling = Sampling(temperature=0.0, n=choices)
        text, most, priority = prompt(pick(LENGTHS), pick([1, 2])), pick(ANSWERS), pick([-1, 0, 1])
        job = Job(rid, text, sampling, most, (), "", rid, time.monotonic(), priority, logprobs, echo)
        self.jobs[rid] = job
        self.scheduler.handle(job)

    def step(self) -> None:
        if self.chance.random() < 0.5:
            self.scheduler._parking.lift()  # or half of a day's requests would wait for the pressure's end
        for _ in range(self.chance.randint(1, 12)):
            self.scheduler.step()

    def break_a_step(self) -> None:
        self.exposed |= {sequence.job.rid for sequence in self.scheduler._sequences()}
        self._break_next.append(True)
        self.scheduler.step()
        self._break_next.clear()
        self.scheduler._faults_in_a_row = 0

    def cancel(self) -> None:
        if self.jobs:
            rid = self.chance.choice(list(self.jobs))
            if not self.is_over(rid):
                self.cancelled.add(rid)
            self.scheduler.handle(Cancel(rid))
            assert self.is_over(rid)

    def trim(self) -> None:
        level, target_bytes = self.chance.choice(["soft", "hard", "critical"]), self.chance.choice([0, 1, ALL])
        self.scheduler.handle(Trim(level=level, target_bytes=target_bytes))  # type: ignore[arg-type]

    def grant(self) -> None:
        self.scheduler.handle(Grant(kv_bytes=self.chance.choice([1, TINY_KV_BYTES, ALL])))

    def resize_the_hot_cache(self) -> None:
        self.scheduler.handle(Grant(hot_bytes=self.chance.choice([0, 64 << 10, HOT_BYTES])))

    def change_turns(self) -> None:
        """While it has no turn, what has come into a lane waits there without a row."""
        if self.chance.random() < 0.5:
            self._turns += 1
        self.scheduler.handle(Turn(turn=self._turns, state=self.chance.choice(["yours", "wanted", "lost"])))

    # ------------------------------------------------------------------ what is asked

    def ask(self) -> None:
        scheduler, lanes, arrivals = self.scheduler, self.scheduler._lanes, self.scheduler._arrivals
        beat = scheduler._figures()
        assert (beat.running, beat.waiting) == (lanes.rows, len(arrivals))
        assert beat.parked <= beat.waiting
        assert beat.kv_bytes >= 0 if lanes.rows else beat.kv_bytes == 0
        assert beat.hot_bytes <= HOT_BYTES
        assert set(beat.lease_tokens) == {sequence.job.rid for sequence in lanes.sequences()}
        assert scheduler.has_work is bool(lanes.rows or len(arrivals))
        assert scheduler.patience_s is None or scheduler.patience_s >= 0
        assert arrivals.blocked is None or arrivals.blocked.stage is Stage.WAITING
        scheduler._parking.needed_bytes(scheduler._sequences())
        scheduler._parking.fit_grant(time.monotonic())
        for lane, sequence in lanes.prefilling():
            assert not self.is_over(sequence.job.rid) and lane.next_chunk(BLOCK) > 0
        for lane in lanes._live:
            assert lane.rows == len(lanes.live(lane)) and lane.cache_bytes >= 0
            assert {held.uid for held in lane.held()} <= set(lanes.live(lane))
        waiting = {sequence.job.rid for sequence in scheduler._sequences()}
        assert waiting == {rid for rid in self.jobs if not self.is_over(rid)}
        scheduler.handle(Probe(Job("p", prompt(100, 1), GREEDY, 1), lambda hot, cold: None))

    def is_over(self, rid: str) -> bool:
        answers = [self.sink.of(rid, choice) for choice in range(self.jobs[rid].sampling.n or 1)]
        return answers[0].error is not None or all(answer.over.is_set() for answer in answers)

    # ------------------------------------------------------------------ how it ends

    def end(self) -> None:
        self.scheduler.handle(Turn(turn=self._turns + 1, state="yours"))
        self.scheduler.handle(Grant(kv_bytes=0))
        self.scheduler._parking.lift()
        for _ in range(3000):
            if self.scheduler.has_work:
                self.scheduler.step()
        self.ask()
        assert not self.scheduler.has_work
        for rid, job in self.jobs.items():
            answers = [self.sink.of(rid, choice) for choice in range(job.sampling.n or 1)]
            if answers[0].error is not None:
                assert rid in self.exposed and "made to fail" in answers[0].error[1], answers[0].error
            elif rid not in self.cancelled:
                for answer in answers:
                    assert (answer.finish, len(answer.ids)) == ("length", job.max_tokens)
                    entries = 0 if job.logprobs is None else job.max_tokens + (len(job.prompt) if job.scores_prompt else 0)
                    assert sum(len(row.logprobs or ()) for row in answer.rows) == entries


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Those of one seed begin alike."""
    return tuple(random.Random(seed).choices(range(10, 400), k=length))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_every_request_ends_once_and_everything_can_be_asked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, wished = KINDS[kind]
    path = family_model(tmp_path / "model", family, **({"head_dim": 32} if family == "llama" else {}))
    if "draft_model" in wished:
        wished = {**wished, "draft_path": str(tiny_model(tmp_path / "draft", head_dim=32, num_hidden_layers=1))}
    break_next: list[bool] = []
    days = [Day(path, wished, seed, break_next) for seed in range(DAYS)]
    model = type(days[0].scheduler._loaded.model)
    call = model.__call__

    def fragile(model: Any, *args: Any, **more: Any) -> object:
        result = call(model, *args, **more)
        if break_next:
            break_next.clear()
            raise BrokenOnce("made to fail")
        return result

    monkeypatch.setattr(model, "__call__", fragile)
    for day in days:
        day.live()
    assert sum(day.scheduler._parking.parks for day in days) > 0
    mx.clear_cache()
