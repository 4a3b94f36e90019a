"""A step that fails costs its batch, not the worker; a worker that only fails says so and goes."""

import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.protocol import Code
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import ForcedText, Gate, RunningEngine
from worker.faults import EXIT_FAILED, EXIT_GPU_FAULT, code_of
from worker.lane_set import LaneSet

PROMPT = list(range(20, 60))
METAL = "[METAL] Command buffer execution failed: {}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Breaker:
    """Makes the model itself fail inside mlx_lm's step, as a lost device would."""

    def __init__(self, lane_model: object, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures_left = 0
        self.error: Exception = RuntimeError("the device went away")
        cls = type(lane_model)
        original = cls.__call__

        def call(model: object, *args: object, **kwargs: object) -> object:
            if self.failures_left:
                self.failures_left -= 1
                raise self.error
            return original(model, *args, **kwargs)

        monkeypatch.setattr(cls, "__call__", call)


@pytest.fixture
def breaker(monkeypatch: pytest.MonkeyPatch) -> Breaker:
    from mlx_lm.models.llama import Model

    return Breaker(Model.__new__(Model), monkeypatch)


def test_a_failed_step_fails_its_batch_and_those_who_wait_are_served(
    model: Path, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunningEngine(model, text=ForcedText(), max_batch=2) as e:
        gate = Gate(monkeypatch)
        batch = [e.submit("a", PROMPT, 500), e.submit("b", PROMPT[1:], 500)]
        waiting = e.submit("c", PROMPT[2:], 12)
        gate.let(8)
        assert all(answer.rows for answer in batch)
        breaker.failures_left = 1
        gate.open()
        assert all(answer.over.wait(20) for answer in [*batch, waiting])
        e.settle()
        assert e.engine.beat().kv_bytes == 0
    for answer in batch:
        assert answer.error is not None
        assert answer.error[0] == Code.INTERNAL
        assert "the device went away" in answer.error[1]
        assert answer.finish is None
    assert_same_greedy(model, PROMPT[2:], greedy_ids(model, PROMPT[2:], 12), waiting.ids)
    assert e.sink.failure is None


def test_two_failures_with_a_good_step_between_them_are_forgiven(model: Path, breaker: Breaker) -> None:
    with RunningEngine(model, text=ForcedText()) as e:
        for round_ in range(4):
            breaker.failures_left = 1
            assert e.ask(f"bad{round_}", PROMPT, 5).error is not None
            assert e.ask(f"good{round_}", PROMPT, 5).finish == "length"
    assert e.sink.failure is None


def test_three_failures_in_a_row_end_the_worker(model: Path, breaker: Breaker) -> None:
    with RunningEngine(model, text=ForcedText(), max_batch=1) as e:
        breaker.failures_left = 3
        with e.at_once():
            answers = [e.submit(f"r{i}", PROMPT, 5) for i in range(5)]
        assert all(answer.over.wait(20) for answer in answers)
    assert [answer.error and answer.error[0] for answer in answers] == [*[Code.INTERNAL] * 3, *[Code.MODEL_FAILED] * 2]
    assert e.sink.failure is not None
    assert (e.sink.failure[0], e.sink.failure[2]) == (Code.MODEL_FAILED, EXIT_FAILED)


def test_a_lost_gpu_ends_the_worker_at_once_and_leaves_its_requests_to_the_next(model: Path, breaker: Breaker) -> None:
    breaker.error = RuntimeError(METAL.format("Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"))
    with RunningEngine(model, text=ForcedText(), max_batch=1) as e:
        e.sink.settled.clear()
        breaker.failures_left = 1
        answers = [e.submit(f"r{i}", PROMPT, 5) for i in range(3)]
        assert e.sink.settled.wait(20)
    assert all(answer.error is None and answer.finish is None for answer in answers)
    assert e.sink.failure is not None
    assert (e.sink.failure[0], e.sink.failure[2]) == (Code.GPU_FAULT, EXIT_GPU_FAULT)


def test_a_failed_allocation_is_called_by_its_name(model: Path, breaker: Breaker) -> None:
    breaker.error = RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
    with RunningEngine(model, text=ForcedText()) as e:
        breaker.failures_left = 1
        answer = e.ask("a", PROMPT, 5)
    assert answer.error is not None
    assert answer.error[0] == Code.OUT_OF_MEMORY


def test_a_generator_of_another_make_is_refused_at_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.generate import GenerationBatch

    original = GenerationBatch.__init__

    def renamed(batch: Any, *args: Any, **kwargs: Any) -> None:
        original(batch, *args, **kwargs)
        del batch.tokens

    monkeypatch.setattr(GenerationBatch, "__init__", renamed)
    engine = RunningEngine(model, text=ForcedText())
    engine.engine.start()
    assert engine.sink.settled.wait(60)
    assert engine.sink.failure is not None
    assert "tested with" in engine.sink.failure[1]


def test_only_memory_errors_are_memory_errors() -> None:
    assert code_of(MemoryError()) is Code.OUT_OF_MEMORY
    assert code_of(RuntimeError("[metal::malloc] Attempting to allocate 5 bytes")) is Code.OUT_OF_MEMORY
    assert code_of(RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")) is Code.OUT_OF_MEMORY
    assert code_of(RuntimeError("kIOGPUCommandBufferCallbackErrorOutOfMemory")) is Code.OUT_OF_MEMORY
    assert code_of(RuntimeError(METAL.format("Insufficient Memory (00000008:…ErrorOutOfMemory)"))) is Code.OUT_OF_MEMORY
    assert code_of(RuntimeError(METAL.format("Discarded (victim of GPU error/recovery)"))) is Code.GPU_FAULT
    assert code_of(ValueError("shapes do not match")) is Code.INTERNAL


def test_every_exit_code_is_in_the_documentation() -> None:
    from worker import faults

    table = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    for name, code in vars(faults).items():
        assert not name.startswith("EXIT_") or f"| {code} |" in table, name


def test_figures_that_cannot_be_told_end_no_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lanes: LaneSet) -> int:
        raise ValueError("nobody knows")

    with RunningEngine(model, text=ForcedText()) as e:
        before = e.engine.beat()
        monkeypatch.setattr(LaneSet, "draft_counts", property(broken))
        answer = e.ask("r", list(range(10, 60)), 8)
        assert (answer.finish, e.engine.beat().running, e.sink.failure) == ("length", before.running, None)
        monkeypatch.undo()
        e.ask("s", list(range(10, 60)), 1)
        until = time.monotonic() + patient_s(20)
        while not e.engine.beat().mx_active_bytes:  # they are told again as soon as they can be
            assert time.monotonic() < until
            time.sleep(0.005)
