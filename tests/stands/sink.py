"""A listener that records what an engine says, and the calls a test needs to wait for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from supervisor.protocol import CacheGrant, Grants, Message, ModelRef, Row, Sampling, Timings, Usage
from tests.stands.patience import patient_s
from worker.blas import load_openblas
from worker.engine import Engine
from worker.job import Job, Loaded, LoadSpec
from worker.job import Text as EngineText
from worker.text import Text

load_openblas()  # before anything imports MLX, or the whole test process computes with the slow library

GREEDY = Sampling(temperature=0.0)
LONG_S = 5.0


class Over(threading.Event):
    """The end of an answer. Who waits long for it waits longer where others have the cores."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout if timeout is None or timeout < LONG_S else patient_s(timeout))


@dataclass
class Answer:
    """All that was said about one request; `tokens` is what `completion_tokens` counted."""

    text: str = ""
    rows: list[Row] = field(default_factory=list)
    accepted: tuple[int, int, int] | None = None
    finish: str | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: tuple[str, str] | None = None
    over: Over = field(default_factory=Over)

    @property
    def ids(self) -> list[int]:
        """With `ForcedText`."""
        return [int(number) for number in self.text.split()]

    @property
    def cached(self) -> int:
        assert self.usage is not None, self
        return self.usage.cached_hot + self.usage.cached_cold


class RecordingSink:
    """Keeps everything per (rid, choice); `steps` keeps the calls of `rows` as they came."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.info: Loaded | None = None
        self.failure: tuple[str, str, int] | None = None
        self.settled = threading.Event()
        self.steps: list[list[Row]] = []
        self.wanted: list[int] = []
        self.told: list[Message] = []
        self._answers: dict[tuple[str, int], Answer] = {}
        self._lock = threading.Lock()

    def of(self, rid: str, choice: int = 0) -> Answer:
        with self._lock:
            return self._answers.setdefault((rid, choice), Answer())

    def progress(self, stage: str, done: int, total: int) -> None:
        self.stages.append((stage, done, total))

    def loaded(self, info: Loaded) -> None:
        self.info = info
        self.settled.set()

    def failed(self, code: str, message: str, exit_code: int) -> None:
        self.failure = (code, message, exit_code)
        self.settled.set()

    def accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None:
        self.of(rid).accepted = (cached_hot, cached_cold, position)

    def rows(self, rows: list[Row]) -> None:
        self.steps.append(rows)
        for row in rows:
            answer = self.of(row.rid, row.choice)
            assert answer.finish is None, f"a row after the last one: {row}"
            assert row.seq == len(answer.rows), f"a gap before {row}"
            answer.rows.append(row)
            answer.text += "".join(piece.text for piece in row.pieces)
            if row.finish is not None:
                answer.finish, answer.stop_string = row.finish, row.stop_string
                answer.usage, answer.timings = row.usage, row.timings
                answer.over.set()

    def want(self, kv_bytes: int) -> None:
        self.wanted.append(kv_bytes)

    def tell(self, message: Message) -> None:
        self.told.append(message)

    def error(self, rid: str, code: str, message: str) -> None:
        answer = self.of(rid)
        answer.error = (code, message)
        answer.over.set()


class RunningEngine:
    """An engine in this process, loaded, with its sink. Use as a context manager."""

    def __init__(
        self,
        model: Path,
        *,
        cache: CacheGrant | None = None,
        max_batch: int = 8,
        text: EngineText | None = None,
        kv_bytes: int = 0,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.sink = RecordingSink()
        ref = ModelRef(id="tiny", path=str(model), context=0)
        grants = Grants(kv_bytes=kv_bytes)
        spec = LoadSpec(ref, max_batch=max_batch, grants=grants, cache=cache or CacheGrant(), settings=settings or {})
        self.engine = Engine(spec, text or Text.open(model), self.sink)

    def __enter__(self) -> Self:
        self.engine.start()
        assert self.sink.settled.wait(patient_s(30)), self.sink.stages
        assert self.sink.failure is None, self.sink.failure
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.stop(10.0)

    def submit(
        self,
        rid: str,
        prompt: list[int],
        max_tokens: int = 8,
        sampling: Sampling = GREEDY,
        stops: tuple[str, ...] = (),
        salt: str = "",
        priority: int = 0,
    ) -> Answer:
        job = Job(rid, tuple(prompt), sampling, max_tokens, stops, salt, rid, time.monotonic(), priority)
        self.engine.submit(job)
        return self.sink.of(rid)

    def ask(self, rid: str, prompt: list[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **more: object) -> Answer:
        """Submits and waits for the end."""
        answer = self.submit(rid, prompt, max_tokens, sampling, **more)  # type: ignore[arg-type]
        assert answer.over.wait(60), rid
        return answer

    @contextlib.contextmanager
    def at_once(self) -> Generator[None]:
        """What is said to the engine meanwhile, it hears together, between two steps."""
        with self.engine._mailbox._arrived:
            yield

    def settle(self) -> None:
        """Waits until the engine reports that nothing runs or waits, and its figures are those after all that it has said."""
        until = time.monotonic() + patient_s(10)
        while True:
            heard = threading.Event()  # between two steps: the last one's figures are told
            self.engine.probe(Job("settled?", (1,), GREEDY, 1), lambda _hot, _cold, heard=heard: heard.set())
            heard.wait(max(0.0, until - time.monotonic()))
            if not ((beat := self.engine.beat()).running or beat.waiting):
                return
            assert time.monotonic() < until, beat
            time.sleep(0.01)


class ForcedText:
    """A `worker.job.Text` that makes every token visible as a number, with end tokens of the test's choice."""

    def __init__(self, eos_ids: frozenset[int] = frozenset(), context: int = 2048) -> None:
        self.eos_ids = eos_ids
        self.context = context

    def stream(self, prompt_ids: Sequence[int], stops: Sequence[str]) -> NumberStream:
        return NumberStream(stops)


class NumberStream:
    """Shows token 17 as "17 "; a stop string matches within what it has shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped_by: str | None = None
        self._stops = stops

    def push(self, token: int) -> str:
        text = f"{token} "
        self.stopped_by = next((stop for stop in self._stops if stop in text), None)
        return "" if self.stopped_by else text

    def close(self) -> str:
        return ""


class Gate:
    """Holds an engine before its next round with anything in a lane, so that a test decides how many have been taken.

    What the test says between two calls is heard before the next round.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._allowed = self._taken = 0
        self._is_open = False
        from worker.scheduler import Scheduler

        original = Scheduler._round

        def round_(scheduler: Scheduler) -> None:
            self._wait_for_leave()
            with self._changed:
                self._allowed -= 1
            original(scheduler)
            with self._changed:
                self._taken += 1
                self._changed.notify_all()
            self._wait_for_leave()

        monkeypatch.setattr(Scheduler, "_round", round_)

    def let(self, rounds: int) -> None:
        """Lets that many rounds happen and waits for them."""
        with self._changed:
            target = self._taken + rounds
            self._allowed += rounds
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._taken >= target, patient_s(20))

    def let_until(self, condition: Callable[[], object], most: int = 60) -> None:
        """Lets rounds happen, one by one, until that holds."""
        for _ in range(most):
            if condition():
                return
            self.let(1)
        assert condition(), f"not within {most} rounds"

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def _wait_for_leave(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._allowed > 0)
