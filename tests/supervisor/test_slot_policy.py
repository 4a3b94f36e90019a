"""What keeps a model loaded and what lets it go: idleness, pins, meters."""

from __future__ import annotations

import pytest

from supervisor.slot_events import (
    Abandon,
    AskStop,
    CallDone,
    ClientsServed,
    Event,
    GatewayLost,
    Granted,
    Kill,
    LoadRequested,
    ModelCost,
    ModelsChanged,
    PinRequested,
    Rejected,
    SlotState,
    Spawn,
    SpawnsHeld,
    Terminate,
    Tick,
    UnloadRequested,
    WorkerBeat,
    WorkerHello,
    WorkerMeasured,
    WorkerReady,
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


def test_a_time_to_live_runs_from_the_last_byte_a_client_was_sent() -> None:
    stage = Stage([IDLER])
    stage.ready_model("a")
    stage.do(ClientsServed("g.1", frozenset({"a", "unknown"})))
    stage.acquire("r1", "a")
    stage.release("r1")
    assert not only(stage.wait(500), AskStop), "somebody still reads the answer"
    stage.do(ClientsServed("g.2", frozenset({"a"})))
    stage.do(ClientsServed("g.1", frozenset()))
    assert not only(stage.wait(500), AskStop), "somebody else does"
    stage.do(GatewayLost("g.2"))
    assert not only(stage.wait(59), AskStop)
    assert one(stage.wait(2), AskStop).reason == "idle for 60 s"


def test_a_model_whose_answer_is_still_read_makes_room_for_others() -> None:
    stage = Stage([IDLER, ModelCost("b", 6)])
    stage.ready_model("a")
    stage.do(ClientsServed("g.1", frozenset({"a"})))
    stage.wait(20)
    assert one(stage.acquire("r1", "b"), AskStop).model == "a", "its worker is not needed for that"


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


def test_a_model_that_drains_for_a_waiter_who_leaves_serves_again() -> None:
    stage = Stage([ModelCost("a", 6), ModelCost("b", 6)])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.wait(stage.timers.fair_wait_s)
    stage.acquire("r3", "a")
    assert (stage.state("a"), stage.slot("a").waiting) == (SlotState.DRAINING, 1)
    left = stage.do(Abandon("r2"))
    assert stage.state("a") is SlotState.READY and one(left, Granted).rid == "r3"
    stage.release("r1")
    stage.release("r3")
    assert not only(stage.wait(100), AskStop) and stage.slot("a").gen == 1


def test_a_drain_goes_on_while_another_waits_for_its_memory_long_enough() -> None:
    stage = Stage([ModelCost("a", 6), ModelCost("b", 6), ModelCost("c", 6)])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.acquire("r3", "c")
    stage.wait(stage.timers.fair_wait_s)
    stage.do(Abandon("r2"))
    assert stage.state("a") is SlotState.DRAINING
    stage.release("r1")
    assert one(stage.exit("a", code=0), Spawn).model == "c"


def test_an_unload_goes_on_draining_after_the_waiter_has_left() -> None:
    stage = Stage([ModelCost("a", 6), ModelCost("b", 6)])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.wait(stage.timers.fair_wait_s)
    stage.do(UnloadRequested("a", "c1", force=False))
    stage.do(Abandon("r2"))
    assert stage.state("a") is SlotState.DRAINING


@pytest.mark.parametrize("gap_s", [35.0, 31.0, 8 * 3600.0])
def test_a_sleep_of_the_supervisor_does_not_look_like_the_silence_of_its_workers(gap_s: float) -> None:
    stage = Stage([ModelCost("a", 4), ModelCost("b", 4)])
    stage.ready_model("a")
    stage.ready_model("b")
    stage.acquire("r1", "a")
    stage.now += gap_s
    woken = stage.do(WorkerBeat("a", 1, 1, 1))
    assert not only(woken, Kill) and one(woken, Event).data["seconds"] > 30
    assert not only(stage.wait(60), Kill), "the beats go on"
    assert stage.slot("a").leases == 1 and stage.state("b") is SlotState.READY


def test_a_worker_that_stays_silent_after_the_sleep_is_lost_after_one_full_wait() -> None:
    stage = Stage([ModelCost("a", 4)])
    stage.ready_model("a")
    stage.beating.clear()
    stage.now += 100
    assert not only(stage.do(Tick()), Kill)
    assert not only(stage.wait(stage.timers.beat_lost_s - 1), Kill)
    assert one(stage.wait(2), Kill).model == "a"


def test_a_start_a_load_and_a_stop_are_not_given_up_for_a_sleep() -> None:
    stage = Stage([ModelCost("a", 4)])
    stage.acquire("r1", "a")
    stage.now += 50
    assert not only(stage.do(Tick()), Kill), "it has not said hello"
    stage.do(WorkerHello("a", 1))
    stage.now += 500
    assert not only(stage.do(Tick()), Kill), "its load has not moved"
    stage.do(WorkerReady("a", 1, 0, 1))
    stage.release("r1")
    stage.do(UnloadRequested("a", "c1", force=False))
    stage.now += 12
    assert not only(stage.do(Tick()), Terminate), "it has had no time to stop"
    assert only(stage.wait(stage.timers.stop_s), Terminate)


def test_a_silent_worker_is_lost_on_time_while_the_machine_runs() -> None:
    stage = Stage([ModelCost("a", 4)])
    stage.ready_model("a")
    stage.beating.clear()
    stage.wait(stage.timers.beat_lost_s - 2)
    assert stage.state("a") is SlotState.READY
    assert only(stage.wait(3), Kill)


def test_once_spawns_are_held_what_would_need_one_is_turned_away_and_what_runs_goes_on() -> None:
    stage = Stage([ModelCost("a", 4), ModelCost("b", 4)])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    assert stage.state("b") is SlotState.SPAWNING
    held = stage.do(SpawnsHeld("newer", "b", 1))
    assert one(held, Terminate).model == "b" and not stage.machine.quiet
    turned_away = one(stage.exit("b", signal=15), Rejected)
    assert (turned_away.rid, turned_away.code, turned_away.message) == ("r2", "shutting_down", "newer")
    assert stage.slot("b").restarts == 0, "it is no crash"
    assert one(stage.acquire("r3", "b"), Rejected).code == "shutting_down"
    assert one(stage.do(LoadRequested("b", "c1")), CallDone).message == "newer"
    assert one(stage.acquire("r4", "a"), Granted).rid == "r4"
    stage.release("r1")
    assert not stage.machine.quiet
    stage.release("r4")
    assert stage.machine.quiet and not only(stage.wait(1000), Spawn)
