"""What keeps a model loaded and what lets it go: idleness, pins, meters."""

from __future__ import annotations

from supervisor.slot_events import (
    AskStop,
    CallDone,
    LoadRequested,
    ModelCost,
    ModelsChanged,
    PinRequested,
    Rejected,
    SlotState,
    Spawn,
    UnloadRequested,
    WorkerMeasured,
)
from tests.supervisor.slot_stage import Stage, one, only

IDLER = ModelCost("a", 6, ttl_s=60)


def test_an_idle_model_is_unloaded_after_its_time_to_live() -> None:
    stage = Stage([IDLER])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.wait(100)
    stage.release("r1")
    assert not only(stage.wait(59), AskStop)
    assert one(stage.wait(2), AskStop).reason == "idle for 60 s"
    stage.exit("a", code=0)
    assert stage.state("a") is SlotState.IDLE


def test_a_model_in_use_outlives_its_time_to_live() -> None:
    stage = Stage([IDLER])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    assert not only(stage.wait(500), AskStop)
    stage.release("r1")
    assert not only(stage.wait(59), AskStop), "the time runs from the end of the last request"


def test_a_request_at_the_last_moment_keeps_the_model() -> None:
    stage = Stage([IDLER])
    stage.ready_model("a")
    stage.wait(49)
    stage.now = stage.slot("a").last_used + 60
    stage.acquire("r1", "a")
    assert stage.slot("a").leases == 1 and not only(stage.all, AskStop)


def test_a_load_by_name_counts_as_a_use() -> None:
    stage = Stage([IDLER])
    stage.ready_model("a")
    stage.wait(40)
    stage.do(LoadRequested("a", "c1"))
    assert not only(stage.wait(59), AskStop)
    assert only(stage.wait(2), AskStop)


def test_a_time_to_live_that_is_set_later_holds_at_once() -> None:
    stage = Stage([ModelCost("a", 6)])
    stage.ready_model("a")
    assert not only(stage.wait(1000), AskStop)
    assert only(stage.do(ModelsChanged((IDLER,))), AskStop)


def test_a_pinned_model_is_neither_idled_out_nor_evicted() -> None:
    stage = Stage([IDLER, ModelCost("b", 6)])
    stage.ready_model("a")
    assert one(stage.do(PinRequested("a", "c1", True)), CallDone).ok
    assert stage.slot("a").pinned
    assert not only(stage.wait(500), AskStop)
    assert one(stage.acquire("r1", "b"), Rejected).code == "model_too_large"
    assert one(stage.do(PinRequested("a", "c2", False)), AskStop).reason == "idle for 60 s"


def test_unpinning_by_call_goes_before_the_settings_for_the_life_of_the_server() -> None:
    stage = Stage([ModelCost("a", 6, pinned=True), ModelCost("b", 6)])
    stage.ready_model("a")
    stage.do(PinRequested("a", "c1", False))
    assert not stage.slot("a").pinned
    stage.do(ModelsChanged((ModelCost("a", 6, pinned=True), ModelCost("b", 6))))
    assert one(stage.acquire("r1", "b"), AskStop).model == "a"


def test_an_unload_ends_the_pin_by_call() -> None:
    stage = Stage([IDLER])
    stage.do(LoadRequested("a", "c1", pin=True))
    stage.come_up("a")
    stage.do(UnloadRequested("a", "c2", force=False))
    stage.exit("a", code=0)
    assert not stage.slot("a").pinned and stage.state("a") is SlotState.IDLE
    assert not only(stage.wait(100), Spawn)


def test_a_pinned_model_comes_back_after_a_crash_through_its_back_off() -> None:
    stage = Stage([ModelCost("a", 6, pinned=True)])
    stage.ready_model("a")
    stage.exit("a", signal=9)
    assert stage.state("a") is SlotState.BACKOFF
    assert one(stage.wait(2), Spawn).model == "a"
    stage.come_up("a")
    assert stage.state("a") is SlotState.READY


def test_a_pinned_model_that_keeps_crashing_is_given_up_like_any_other() -> None:
    stage = Stage([ModelCost("a", 6, pinned=True)])
    stage.ready_model("a")
    for _ in range(3):
        stage.exit("a", signal=9)
        stage.wait(10)
    assert stage.state("a") is SlotState.FAILED
    assert not only(stage.wait(3600), Spawn)


def test_an_unpinned_model_stays_away_after_a_crash_until_somebody_wants_it() -> None:
    stage = Stage([ModelCost("a", 6)])
    stage.ready_model("a")
    stage.exit("a", signal=9)
    assert not only(stage.wait(100), Spawn)


def test_a_meter_raises_a_charge_and_never_lowers_it() -> None:
    stage = Stage([ModelCost("a", 4), ModelCost("b", 4)])
    stage.ready_model("a")
    stage.do(WorkerMeasured("a", 1, 5))
    stage.do(WorkerMeasured("a", 1, 2))
    assert (stage.slot("a").charged_bytes, stage.slot("a").measured_bytes) == (5, 2)
    stage.do(WorkerMeasured("a", 7, 9))
    assert stage.slot("a").charged_bytes == 5, "another incarnation's reading"


def test_idle_models_pay_for_one_that_measures_above_its_charge() -> None:
    stage = Stage([ModelCost("a", 4), ModelCost("b", 4)])
    stage.ready_model("a")
    stage.ready_model("b")
    stage.acquire("r1", "b")
    assert one(stage.do(WorkerMeasured("b", 1, 8)), AskStop).model == "a"
