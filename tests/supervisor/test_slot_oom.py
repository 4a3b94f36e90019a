"""Workers that die for want of memory: the model is tried once more with more set aside, the request is not."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.slot_events import (
    Granted,
    Lost,
    ModelCost,
    ModelsChanged,
    Rejected,
    Remember,
    ResetRequested,
    SlotState,
    Spawn,
    WorkerFault,
    WorkerMeasured,
)
from tests.supervisor.slot_stage import Stage, one, only

A = ModelCost("a", 40, load_key="k", load_detail="weights 40")


def stage(*costs: ModelCost) -> Stage:
    subject = Stage(costs or [A], budget_bytes=100)
    subject.ready_model("a")
    return subject


def test_a_death_by_the_kernels_hand_is_told_as_such_and_raises_what_is_set_aside() -> None:
    subject = stage()
    subject.acquire("r1", "a")
    subject.do(WorkerMeasured("a", 1, 60))
    effects = subject.exit("a", signal=9, oom_killed=True)
    lost = one(effects, Lost)
    assert lost.code == "oom" and "ran out of memory" in lost.message, "no code that a gateway retries on"
    assert one(effects, Remember) == Remember("a", "k", 75), "a quarter more than it was measured at"
    subject.acquire("r2", "a")
    subject.wait(2)
    assert subject.state("a") is SlotState.SPAWNING and subject.slot("a").charged_bytes == 75
    assert [granted.rid for granted in only(subject.come_up("a"), Granted)] == ["r2"]


@pytest.mark.parametrize(
    ("how", "is_oom"),
    [
        ({"signal": 9, "oom_killed": True}, True),
        ({"signal": 9}, False),
        ({"signal": 11, "oom_killed": True}, False),
        ({"signal": 6, "tail": "[metal::malloc] Attempting to allocate 9 bytes"}, True),
        ({"signal": 6, "tail": "libc++abi: ... kIOGPUCommandBufferCallbackErrorOutOfMemory"}, True),
        ({"code": 1, "tail": "Traceback ...\nMemoryError"}, True),
        ({"code": 1, "tail": "Traceback ...\nValueError"}, False),
    ],
    ids=str,
)
def test_only_a_death_that_shows_it_counts_as_one_for_memory(how: dict[str, Any], is_oom: bool) -> None:
    subject = stage()
    subject.acquire("r1", "a")
    effects = subject.exit("a", **how)
    assert one(effects, Lost).code == ("oom" if is_oom else "worker_lost")
    assert len(only(effects, Remember)) == is_oom


def test_a_worker_that_says_so_itself_is_believed() -> None:
    subject = stage()
    subject.acquire("r1", "a")
    assert one(subject.do(WorkerFault("a", 1, "oom", "no room for 7 GiB", True)), Lost).code == "oom"
    assert one(subject.exit("a", code=70), Remember).need_bytes == 44, "never measured: more than before in any case"


def test_a_kill_of_our_own_is_no_death_for_memory() -> None:
    subject = stage()
    subject.beating.clear()
    subject.wait(31)
    assert not only(subject.exit("a", signal=9, oom_killed=True), Remember)


def test_the_second_such_death_is_the_last() -> None:
    subject = stage()
    subject.exit("a", signal=9, oom_killed=True)
    subject.acquire("r1", "a")
    subject.wait(2)
    effects = subject.exit("a", signal=9, oom_killed=True)
    rejected = one(effects, Rejected)
    assert rejected.code == "model_failed" and "ran out of memory" in rejected.message
    assert subject.state("a") is SlotState.FAILED
    subject.do(ResetRequested("a", "c1"))
    subject.acquire("r2", "a")
    assert subject.state("a") is SlotState.SPAWNING and subject.slot("a").charged_bytes == 40, "a reset forgets what was learnt"


def test_what_is_set_aside_never_exceeds_the_budget_so_that_it_is_tried_alone() -> None:
    subject = stage()
    subject.do(WorkerMeasured("a", 1, 99))
    assert one(subject.exit("a", signal=9, oom_killed=True), Remember).need_bytes == 100
    subject.acquire("r1", "a")
    assert one(subject.wait(2), Spawn).model == "a"


def test_what_an_earlier_run_learnt_holds_for_the_same_files_and_settings() -> None:
    subject = Stage([ModelCost("a", 40, load_key="k", known_bytes=75)], budget_bytes=100)
    subject.acquire("r1", "a")
    assert subject.slot("a").charged_bytes == 75
    subject.come_up("a")
    subject.release("r1")
    subject.do(ModelsChanged((ModelCost("a", 50, load_key="k2"),)))
    subject.exit("a", code=0)
    subject.acquire("r2", "a")
    assert subject.slot("a").charged_bytes == 50
