"""Loading, granting, eviction and fairness."""

from __future__ import annotations

from supervisor.slot_events import (
    Abandon,
    AskStop,
    CallDone,
    Event,
    GatewayLost,
    Granted,
    Kill,
    LoadRequested,
    Lost,
    ModelCost,
    ModelsChanged,
    QueuedAt,
    Rejected,
    Shutdown,
    SlotState,
    Spawn,
    Terminate,
    UnloadRequested,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
)
from supervisor.slot_rules import Timers
from tests.supervisor.slot_stage import Stage, one, only

A, B, C = ModelCost("a", 6), ModelCost("b", 6), ModelCost("c", 3)


def test_the_first_request_spawns_and_is_granted_when_the_worker_is_ready() -> None:
    stage = Stage([A])
    effects = stage.acquire("r1", "a")
    assert one(effects, Spawn) == Spawn("a", 1)
    assert only(effects, QueuedAt)[0] == QueuedAt("r1", "g.1", 1, SlotState.QUEUED)
    granted = one(stage.come_up("a"), Granted)
    assert (granted.rid, granted.model, granted.gen) == ("r1", "a", 1)
    assert stage.slot("a").leases == 1


def test_requests_for_one_model_share_one_load_and_are_served_together() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    assert not only(stage.acquire("r2", "a"), Spawn)
    assert [granted.rid for granted in only(stage.come_up("a"), Granted)] == ["r1", "r2"]


def test_only_one_model_loads_at_a_time_and_cold_loads_go_in_order_of_arrival() -> None:
    stage = Stage([ModelCost("a", 1), ModelCost("b", 1), ModelCost("c", 1)])
    stage.acquire("r1", "c")
    stage.acquire("r2", "b")
    stage.acquire("r3", "a")
    assert [spawn.model for spawn in only(stage.all, Spawn)] == ["c"]
    stage.come_up("c")
    stage.come_up("b")
    stage.come_up("a")
    assert [spawn.model for spawn in only(stage.all, Spawn)] == ["c", "b", "a"]


def test_a_ready_model_grants_while_another_loads() -> None:
    stage = Stage([ModelCost("a", 1), ModelCost("b", 1)])
    stage.ready_model("a")
    stage.acquire("r1", "b")
    assert one(stage.acquire("r2", "a"), Granted).rid == "r2"


def test_a_full_model_rejects_with_a_time_to_retry() -> None:
    stage = Stage([A], max_queue=1)
    stage.ready_model("a", max_inflight=2)
    for rid in ("r1", "r2", "r3"):
        assert one(stage.acquire(rid, "a"), Granted)
    rejected = one(stage.acquire("r4", "a"), Rejected)
    assert rejected.code == "queue_full" and rejected.retry_after_s
    stage.release("r1")
    assert one(stage.acquire("r5", "a"), Granted)


def test_those_beyond_a_new_workers_room_wait_and_follow_as_leases_are_released() -> None:
    stage = Stage([A], max_queue=1)
    stage.ready_model("a", max_inflight=3)
    stage.do(UnloadRequested("a", None, force=True))
    stage.exit("a", code=0)
    for rid in ("r1", "r2", "r3", "r4"):
        stage.acquire(rid, "a")
    assert [granted.rid for granted in only(stage.come_up("a", max_inflight=1), Granted)] == ["r1", "r2"]
    assert one(stage.release("r1"), Granted).rid == "r3"


def test_an_idle_model_is_evicted_and_the_next_spawns_only_after_its_exit() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    effects = stage.acquire("r1", "b")
    assert one(effects, AskStop).reason == "evicted"
    assert not only(effects, Spawn)
    assert one(stage.exit("a", code=0), Spawn).model == "b"
    assert stage.state("a") is SlotState.IDLE


def test_the_least_recently_used_idle_model_is_evicted() -> None:
    stage = Stage([C, ModelCost("d", 3), ModelCost("e", 3), ModelCost("f", 3)])
    for model in ("c", "d", "e"):
        stage.ready_model(model)
    stage.acquire("r1", "c")
    stage.wait(1)
    stage.release("r1")
    assert one(stage.acquire("r2", "f"), AskStop).model == "d"


def test_what_is_leaving_counts_as_room() -> None:
    stage = Stage([C, ModelCost("d", 3), ModelCost("e", 3), ModelCost("f", 3)])
    for model in ("c", "d", "e"):
        stage.ready_model(model)
    stage.acquire("r1", "f")
    stage.wait(5)
    assert [stop.model for stop in only(stage.all, AskStop)] == ["c"]


def test_an_unpinned_model_goes_before_a_pinned_one_that_was_used_less_recently() -> None:
    stage = Stage([ModelCost("old", 3, pinned=True), C, A])
    stage.ready_model("old")
    stage.ready_model("c")
    assert one(stage.acquire("r1", "a"), AskStop).model == "c"


def test_an_unload_undoes_the_pin_of_a_load_call() -> None:
    stage = Stage([A])
    stage.do(LoadRequested("a", None, pin=True))
    assert stage.slot("a").pinned
    stage.do(UnloadRequested("a", None, force=False))
    assert not stage.slot("a").pinned


def test_nothing_is_evicted_that_does_not_help() -> None:
    stage = Stage([ModelCost("small", 1), ModelCost("big", 8), ModelCost("new", 8)])
    stage.ready_model("small")
    stage.ready_model("big")
    assert [stop.model for stop in only(stage.acquire("r1", "new"), AskStop)] == ["big"]


def test_a_busy_model_is_never_evicted() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.wait(3600)
    assert not only(stage.all, AskStop) and not only(stage.all, Kill) and not only(stage.all, Lost)
    assert stage.state("a") is SlotState.DRAINING
    assert one(stage.release("r1"), AskStop).model == "a"


def test_a_pinned_model_is_never_evicted_and_what_cannot_fit_beside_it_is_refused_with_the_sum() -> None:
    stage = Stage([ModelCost("a", 6, pinned=True), B])
    stage.ready_model("a")
    rejected = one(stage.acquire("r1", "b"), Rejected)
    assert rejected.code == "model_too_large" and rejected.retry_after_s is None
    assert "pinned models hold" in rejected.message
    assert stage.state("a") is SlotState.READY


def test_a_request_already_queued_is_refused_when_a_pin_takes_its_room() -> None:
    stage = Stage([A, B])
    stage.do(LoadRequested("a", "c1", pin=True))
    stage.acquire("r1", "b")
    assert one(stage.come_up("a"), CallDone) == CallDone("c1", True, "", "a is ready")
    assert [rejected.code for rejected in only(stage.all, Rejected)] == ["model_too_large"]


def test_a_model_larger_than_the_budget_is_refused_at_once_and_evicts_nothing() -> None:
    stage = Stage([A, ModelCost("huge", 11, load_detail="weights 9 B + runtime 2 B")])
    stage.ready_model("a")
    effects = stage.acquire("r1", "huge")
    rejected = one(effects, Rejected)
    assert rejected.code == "model_too_large" and "weights 9 B + runtime 2 B" in rejected.message
    assert not only(effects, AskStop) and stage.state("huge") is SlotState.IDLE
    assert one(stage.do(LoadRequested("huge", "c1")), CallDone).code == "model_too_large"


def test_after_the_fair_wait_the_longest_resident_busy_model_drains() -> None:
    stage = Stage([ModelCost("a", 5), ModelCost("b", 5), ModelCost("c", 5)])
    stage.ready_model("b")
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.acquire("r3", "c")
    stage.wait(stage.timers.fair_wait_s - 0.1)
    assert stage.state("b") is SlotState.READY
    stage.wait(0.1)
    assert stage.state("b") is SlotState.DRAINING and stage.state("a") is SlotState.READY
    stage.wait(100)
    assert stage.state("a") is SlotState.READY, "one drain makes room enough"


def test_the_fair_wait_is_a_deadline_of_its_own() -> None:
    stage = Stage([A, B], timers=Timers(beat_lost_s=1000))
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    assert stage.machine.next_deadline() == stage.now + stage.timers.fair_wait_s


def test_new_requests_of_a_draining_model_queue_behind_the_one_that_waited() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.wait(stage.timers.fair_wait_s)
    assert not only(stage.acquire("r3", "a"), Granted)
    stage.release("r1")
    assert one(stage.exit("a", code=0), Spawn).model == "b"
    assert one(stage.come_up("b"), Granted).rid == "r2"
    assert stage.slot("a").waiting == 1


def test_a_model_that_has_just_loaded_is_protected() -> None:
    stage = Stage([A, B])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.release("r1")
    stage.acquire("r2", "b")
    assert stage.state("a") is SlotState.READY
    stage.wait(stage.timers.min_resident_s - 0.1)
    assert stage.state("a") is SlotState.READY
    stage.wait(0.1)
    assert stage.state("a") is SlotState.STOPPING


def test_overlapping_traffic_does_not_starve_another_model() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    request_s, stop_s, load_s = 7.0, 2.0, 5.0
    stage.acquire("a-0", "a")
    stage.acquire("waits", "b")
    started, running = stage.now, [("a-0", stage.now + request_s)]
    for number in range(1, 200):
        stage.wait(1.0)
        while running and running[0][1] <= stage.now:
            if only(stage.release(running.pop(0)[0]), AskStop):
                stage.wait(stop_s)
                stage.exit("a", code=0)
                stage.wait(load_s)
                stage.come_up("b")
        if any(granted.rid == "waits" for granted in only(stage.all, Granted)):
            break
        if only(stage.acquire(f"a-{number}", "a"), Granted):
            running.append((f"a-{number}", stage.now + request_s))
    bound_s = max(stage.timers.fair_wait_s, stage.timers.min_resident_s) + request_s + stop_s + load_s
    assert any(granted.rid == "waits" for granted in only(stage.all, Granted))
    assert stage.now - started <= bound_s
    assert not only(stage.all, Lost)


def test_a_load_whose_requester_left_completes_and_can_then_be_evicted() -> None:
    stage = Stage([A, B])
    stage.acquire("r1", "a")
    assert not only(stage.do(Abandon("r1")), Terminate)
    stage.come_up("a")
    assert stage.state("a") is SlotState.READY
    stage.wait(stage.timers.min_resident_s)
    assert one(stage.acquire("r2", "b"), AskStop).model == "a"


def test_a_queued_model_nobody_waits_for_any_more_is_not_loaded() -> None:
    stage = Stage([A, C])
    stage.acquire("r1", "a")
    stage.acquire("r2", "c")
    stage.do(Abandon("r2"))
    stage.come_up("a")
    assert stage.state("c") is SlotState.IDLE


def test_abandoning_after_the_grant_releases_the_lease() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.do(Abandon("r1"))
    assert stage.slot("a").leases == 0
    assert stage.release("r1") == []


def test_a_lost_gateways_leases_and_waiters_are_released() -> None:
    stage = Stage([A, C, ModelCost("d", 3)])
    stage.acquire("r1", "a", gateway="g.1")
    stage.come_up("a")
    stage.acquire("r2", "c", gateway="g.1")
    stage.acquire("r3", "d", gateway="g.1")
    stage.acquire("r4", "c", gateway="g.2")
    stage.do(GatewayLost("g.1"))
    assert stage.slot("a").leases == 0 and stage.state("d") is SlotState.IDLE
    assert one(stage.come_up("c"), Granted).rid == "r4"


def test_a_request_is_rejected_at_its_deadline() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a", deadline_at=stage.now + 5)
    assert not only(stage.wait(4.9), Rejected)
    assert one(stage.wait(0.1), Rejected).code == "deadline"
    assert one(stage.acquire("r2", "a", deadline_at=stage.now), Rejected).code == "deadline"


def test_a_repeated_acquire_is_answered_once() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    assert stage.acquire("r1", "a") == []
    assert len(only(stage.come_up("a"), Granted)) == 1
    assert stage.acquire("r1", "a") == []


def test_unknown_models_are_not_found() -> None:
    stage = Stage([A])
    assert one(stage.acquire("r1", "zzz"), Rejected).code == "model_not_found"
    assert one(stage.do(LoadRequested("zzz", "c1")), CallDone).code == "model_not_found"


def test_waiters_hear_how_far_the_load_is() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    assert [told.state for told in only(stage.do(WorkerHello("a", 1)), QueuedAt)] == [SlotState.LOADING]
    effects = stage.do(WorkerProgress("a", 1, "weights", 3, 10))
    assert one(effects, QueuedAt).position == 1
    assert dict(one(effects, Event).data) == {"stage": "weights", "done": 3, "total": 10}
    view = stage.slot("a")
    assert (view.stage, view.done, view.total) == ("weights", 3, 10)


def test_every_transition_is_an_event() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(UnloadRequested("a", None, force=False))
    stage.exit("a", code=0)
    states = [effect.data["state"] for effect in only(stage.all, Event) if effect.kind == "slot"]
    assert states == ["idle", "queued", "spawning", "loading", "ready", "draining", "stopping", "idle"]


def test_a_load_call_is_answered_when_the_model_is_ready() -> None:
    stage = Stage([A])
    assert not only(stage.do(LoadRequested("a", "c1")), CallDone)
    assert one(stage.come_up("a"), CallDone) == CallDone("c1", True, "", "a is ready")
    assert one(stage.do(LoadRequested("a", "c2")), CallDone).ok


def test_unloading_while_loading_works_and_tells_those_who_waited() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.do(LoadRequested("a", "c1"))
    stage.do(WorkerHello("a", 1))
    effects = stage.do(UnloadRequested("a", "c2", force=False))
    assert one(effects, AskStop).reason == "unload"
    assert one(effects, Rejected).code == "model_unloaded"
    assert (one(effects, CallDone).call, one(effects, CallDone).ok) == ("c1", False)
    assert one(stage.exit("a", code=0), CallDone) == CallDone("c2", True, "", "a is unloaded")
    assert stage.state("a") is SlotState.IDLE


def test_unloading_before_the_hello_signals_at_once() -> None:
    stage = Stage([A])
    stage.do(LoadRequested("a", None))
    assert one(stage.do(UnloadRequested("a", None, force=False)), Terminate)
    stage.do(WorkerReady("a", 1, 0, 1))
    assert stage.state("a") is SlotState.STOPPING


def test_an_unload_lets_running_requests_finish_within_its_limit() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "a")
    assert not only(stage.do(UnloadRequested("a", "c1", force=False)), AskStop)
    stage.release("r1")
    assert not only(stage.wait(29.9), Lost)
    effects = stage.wait(0.1)
    assert (one(effects, Lost).rid, one(effects, Lost).code) == ("r2", "model_unloaded")
    assert one(effects, AskStop)


def test_a_request_that_comes_during_an_unload_waits_for_a_new_worker() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.do(UnloadRequested("a", "c1", force=False))
    assert one(stage.acquire("r2", "a"), QueuedAt).state is SlotState.DRAINING
    stage.release("r1")
    effects = stage.exit("a", code=0)
    assert one(effects, CallDone).ok and one(effects, Spawn).gen == 2
    assert one(stage.come_up("a"), Granted).rid == "r2"


def test_a_forced_unload_does_not_wait() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    effects = stage.do(UnloadRequested("a", "c1", force=True))
    assert one(effects, Lost).code == "model_unloaded" and one(effects, AskStop)


def test_a_fair_drain_becomes_limited_by_an_unload() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    stage.wait(100)
    stage.do(UnloadRequested("a", None, force=False))
    assert one(stage.wait(30), Lost).rid == "r1"


def test_a_stop_escalates_to_terminate_and_kill() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(UnloadRequested("a", None, force=False))
    assert not only(stage.wait(9.9), Terminate)
    assert one(stage.wait(0.1), Terminate)
    assert not only(stage.wait(2.9), Kill)
    assert one(stage.wait(0.1), Kill)
    stage.exit("a", signal=9)
    assert stage.state("a") is SlotState.IDLE and stage.slot("a").restarts == 0


def test_changed_load_settings_make_a_worker_stale() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    effects = stage.do(ModelsChanged((ModelCost("a", 6, load_key="ctx=4096"),)))
    assert one(effects, AskStop).reason == "stale"
    stage.exit("a", code=0)
    assert stage.state("a") is SlotState.IDLE


def test_a_stale_worker_finishes_its_requests_and_the_next_request_gets_a_new_one() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.do(ModelsChanged((ModelCost("a", 6, load_key="ctx=4096"),)))
    assert not only(stage.acquire("r2", "a"), Granted)
    stage.wait(600)
    assert not only(stage.all, Lost)
    stage.release("r1")
    assert one(stage.exit("a", code=0), Spawn).gen == 2
    assert one(stage.come_up("a"), Granted).rid == "r2"


def test_settings_that_do_not_change_the_load_leave_the_worker_alone() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(ModelsChanged((ModelCost("a", 7, pinned=True),)))
    assert stage.state("a") is SlotState.READY and stage.slot("a").pinned
    assert stage.slot("a").charged_bytes == 6


def test_a_vanished_model_drains_and_disappears() -> None:
    stage = Stage([A, C])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.do(ModelsChanged((C,)))
    assert one(stage.acquire("r2", "a"), Rejected).code == "model_not_found"
    stage.release("r1")
    stage.exit("a", code=0)
    assert [view.model for view in stage.machine.view()] == ["c"]
    stage.do(ModelsChanged((A, C)))
    assert one(stage.acquire("r3", "a"), Spawn).gen == 2


def test_the_charge_rises_to_what_ready_measured_and_never_falls_below_the_reservation() -> None:
    stage = Stage([C, ModelCost("d", 3)])
    stage.acquire("r1", "c")
    stage.come_up("c", measured_bytes=5)
    stage.acquire("r2", "d")
    stage.come_up("d", measured_bytes=1)
    assert (stage.slot("c").charged_bytes, stage.slot("d").charged_bytes) == (5, 3)
    assert stage.machine.budget().charged_bytes == 8


def test_idle_models_pay_for_one_that_measured_above_its_charge() -> None:
    stage = Stage([C, A])
    stage.ready_model("c")
    stage.acquire("r1", "a")
    effects = stage.come_up("a", measured_bytes=9)
    assert one(effects, Granted) and one(effects, AskStop).model == "c"


def test_a_model_that_measures_above_the_whole_budget_is_stopped_and_refused_from_then_on() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    effects = stage.come_up("a", measured_bytes=11)
    assert one(effects, Rejected).code == "model_too_large" and one(effects, AskStop).reason == "too large"
    stage.exit("a", code=0)
    assert one(stage.acquire("r2", "a"), Rejected).code == "model_too_large"


def test_shutdown_ends_everything_within_twenty_seconds_of_the_worst_workers() -> None:
    stage = Stage([C, ModelCost("d", 3), ModelCost("e", 3)])
    stage.ready_model("c")
    stage.acquire("r1", "c")
    stage.acquire("r2", "d")
    stage.acquire("r3", "e")
    stage.do(LoadRequested("e", "c1"))
    effects = stage.do(Shutdown())
    assert one(effects, Lost).code == "shutting_down"
    assert sorted(rejected.rid for rejected in only(effects, Rejected)) == ["r2", "r3"]
    assert {rejected.code for rejected in only(effects, Rejected)} == {"shutting_down"}
    assert one(effects, CallDone).code == "shutting_down"
    assert one(stage.acquire("r4", "c"), Rejected).code == "shutting_down"
    effects = stage.wait(20)
    assert {kill.model for kill in only(effects, Kill)} == {"c", "d"}
    stage.exit("c", signal=9)
    assert not stage.machine.stopped
    stage.exit("d", signal=9)
    assert stage.machine.stopped and not only(effects, Spawn)


def test_the_shutdown_limit_holds_also_with_long_timers() -> None:
    stage = Stage([A], timers=Timers(stop_s=300))
    stage.ready_model("a")
    stage.do(Shutdown())
    assert one(stage.wait(20), Kill)


def test_a_machine_without_workers_stops_at_once() -> None:
    stage = Stage([A])
    assert not stage.machine.stopped
    stage.do(Shutdown())
    assert stage.machine.stopped
