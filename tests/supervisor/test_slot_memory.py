"""What models give up for each other and for other programs: hot caches, then idle models, and a busy one only at the last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.budget import GIB, MIB
from supervisor.pressure import Level
from supervisor.slot_events import (
    AskStop,
    Effect,
    Event,
    Granted,
    GrantMemory,
    Lost,
    MemoryRead,
    ModelCost,
    ReadMemory,
    Rejected,
    ResetRequested,
    SlotState,
    Spawn,
    TrimWorker,
    WorkerBeat,
    WorkerMeasured,
    WorkerWants,
)
from supervisor.slot_rules import Policy
from tests.supervisor.slot_stage import Stage, one, only

EASY = MemoryRead(Level.NONE, "", 1000 * GIB, "", 0, 10 * GIB, {})
HARD = replace(EASY, level=Level.HARD, because="it is full", over_bytes=GIB)
CRITICAL = replace(HARD, level=Level.CRITICAL)


def cost(model: str, load: int, hot: int = 0, **more: Any) -> ModelCost:
    return ModelCost(model, load * GIB, hot_bytes=hot * GIB, kv_bytes=GIB, **more)


def stage(*costs: ModelCost, budget: int = 10, **policy: Any) -> Stage:
    return Stage(costs, budget_bytes=budget * GIB, policy=Policy(budget * GIB, 4, **policy))


def hold(subject: Stage, model: str, hot: int) -> list[Effect]:
    """The worker reports what its hot cache holds."""
    subject.hot[model] = hot * GIB
    return subject.do(WorkerBeat(model, subject.slot(model).gen, 1, 0, hot * GIB))


def hot(subject: Stage, model: str) -> int:
    return subject.slot(model).hot_granted_bytes // GIB


# Hot caches


def test_a_hot_cache_gets_what_is_free_and_no_more() -> None:
    subject = stage(cost("a", 4, hot=3), cost("b", 2, hot=3))
    subject.ready_model("a")
    subject.ready_model("b")
    assert (hot(subject, "a"), hot(subject, "b")) == (3, 1)
    assert subject.machine.budget().charged_bytes == 10 * GIB


def test_an_empty_hot_cache_makes_room_at_once_and_nobody_is_refused_or_evicted() -> None:
    subject = stage(cost("a", 4, hot=5), cost("b", 5))
    subject.ready_model("a")
    effects = subject.acquire("r1", "b")
    assert one(effects, GrantMemory) == GrantMemory("a", 1, hot_bytes=GIB)
    assert one(effects, Spawn).model == "b" and not only(effects, AskStop)


def test_a_full_hot_cache_shrinks_and_the_load_waits_until_the_worker_says_so() -> None:
    subject = stage(cost("a", 4, hot=5), cost("b", 5))
    subject.ready_model("a")
    hold(subject, "a", 5)
    effects = subject.acquire("r1", "b")
    assert one(effects, GrantMemory).hot_bytes == GIB and not only(effects, Spawn)
    assert subject.slot("a").charged_bytes == 9 * GIB, "its bytes count until they are given back, and once"
    assert not only(subject.wait(1), GrantMemory) and not only(subject.all, AskStop), "told once"
    assert not only(hold(subject, "a", 3), Spawn)
    assert one(hold(subject, "a", 1), Spawn).model == "b"
    assert subject.slot("a").charged_bytes == 5 * GIB


def test_hot_caches_are_not_emptied_for_a_load_that_needs_more_than_them() -> None:
    subject = stage(cost("a", 4, hot=3), cost("b", 8))
    subject.ready_model("a")
    hold(subject, "a", 3)
    subject.acquire("r0", "a")
    assert not only(subject.acquire("r1", "b"), GrantMemory), "a is busy: its cache alone would not help"
    subject.release("r0")
    assert one(subject.all[-3:], AskStop).model == "a"


def test_a_hot_cache_grows_back_a_while_after_the_memory_is_free() -> None:
    subject = stage(cost("a", 4, hot=5), cost("b", 5))
    subject.ready_model("a")
    subject.acquire("r1", "b")
    subject.come_up("b")
    assert hot(subject, "a") == 1
    subject.release("r1")
    subject.exit("b", code=1)
    assert hot(subject, "a") == 1
    subject.wait(30)
    assert hot(subject, "a") == 5


def test_pinned_models_hot_caches_do_not_make_another_too_large() -> None:
    subject = stage(cost("a", 4, hot=5, pinned=True), cost("b", 6))
    subject.ready_model("a")
    assert one(subject.acquire("r1", "b"), Spawn).model == "b"


# KV


def test_kv_is_lent_from_what_is_free_and_given_back() -> None:
    subject = stage(cost("a", 4), cost("b", 4))
    subject.ready_model("a")
    subject.acquire("r1", "a")
    assert one(subject.do(WorkerWants("a", 1, 3 * GIB)), GrantMemory).kv_bytes == 3 * GIB
    assert subject.slot("a").charged_bytes == 6 * GIB
    assert one(subject.do(WorkerWants("a", 1, 0)), GrantMemory).kv_bytes == GIB, "never below what its load reserved"
    assert subject.slot("a").charged_bytes == 4 * GIB


def test_hot_caches_and_then_idle_models_make_room_for_the_kv_of_a_busy_one() -> None:
    subject = stage(cost("a", 4), cost("b", 4, hot=2))
    subject.ready_model("b")
    subject.ready_model("a")
    subject.acquire("r1", "a")
    effects = subject.do(WorkerWants("a", 1, 2 * GIB))
    assert [effect for effect in effects if isinstance(effect, GrantMemory)] == [
        GrantMemory("b", 1, hot_bytes=GIB),
        GrantMemory("a", 1, kv_bytes=2 * GIB),
    ]
    effects = subject.do(WorkerWants("a", 1, 5 * GIB))
    assert one(effects, AskStop).model == "b"
    assert one(subject.exit("b", code=0), GrantMemory) == GrantMemory("a", 1, kv_bytes=5 * GIB)


def test_a_peak_that_has_passed_is_charged_until_a_reset_and_seen_as_such() -> None:
    subject = stage(replace(cost("a", 4), pinned=True), cost("b", 4))
    subject.ready_model("a")
    subject.do(WorkerMeasured("a", 1, 9 * GIB))
    assert (subject.slot("a").charged_bytes, subject.slot("a").past_peak_bytes) == (9 * GIB, 0), "it is as large as that"
    subject.do(WorkerMeasured("a", 1, 5 * GIB))
    assert (subject.slot("a").charged_bytes, subject.slot("a").past_peak_bytes) == (9 * GIB, 4 * GIB)
    assert one(subject.acquire("r1", "b"), Rejected).code == "model_too_large"
    subject.do(ResetRequested("a", None))
    assert (subject.slot("a").charged_bytes, subject.slot("a").past_peak_bytes) == (5 * GIB, 0)
    subject.acquire("r2", "b")
    assert subject.slot("b").state is SlotState.SPAWNING
    subject.do(WorkerMeasured("a", 1, GIB))
    subject.do(ResetRequested("a", None))
    assert subject.slot("a").charged_bytes == 4 * GIB, "never less than what its load was given"


def test_nobody_goes_for_kv_whose_want_was_taken_back() -> None:
    subject = stage(cost("a", 4), cost("b", 4))
    subject.ready_model("b")
    subject.ready_model("a")
    subject.acquire("r1", "a")
    subject.acquire("r2", "b")
    assert one(subject.do(WorkerWants("a", 1, 5 * GIB)), GrantMemory).kv_bytes == 3 * GIB, "what there is; b is busy"
    subject.do(WorkerWants("a", 1, 3 * GIB))
    subject.wait(3)
    assert not only(subject.release("r2"), AskStop)
    assert not only(subject.wait(20), AskStop)


def test_whoever_asks_for_kv_hears_that_more_comes_while_others_still_give_it_up() -> None:
    subject = stage(cost("a", 4), cost("b", 4, hot=2), cost("c", 1))
    subject.ready_model("b")
    subject.ready_model("a")
    for rid, model in (("r1", "a"), ("r2", "b")):
        subject.acquire(rid, model)
    subject.do(WorkerBeat("b", 1, 1, 1, hot_bytes=2 * GIB))
    kv = [effect for effect in subject.do(WorkerWants("a", 1, 3 * GIB)) if getattr(effect, "kv_bytes", None)]
    assert kv == [GrantMemory("a", 1, kv_bytes=GIB, more_soon=True)], "b holds what it is to give up"
    kv = [effect for effect in subject.do(WorkerBeat("b", 1, 2, 1)) if getattr(effect, "kv_bytes", None)]
    assert kv == [GrantMemory("a", 1, kv_bytes=3 * GIB)]
    assert one(subject.do(WorkerWants("a", 1, 9 * GIB)), GrantMemory) == GrantMemory("a", 1, kv_bytes=3 * GIB), "that is all"


def test_no_model_is_evicted_for_kv_that_would_still_not_fit() -> None:
    subject = stage(cost("a", 4), cost("b", 4))
    subject.ready_model("b")
    subject.ready_model("a")
    subject.acquire("r1", "a")
    effects = subject.do(WorkerWants("a", 1, 9 * GIB))
    assert not only(effects, AskStop)
    assert one(effects, GrantMemory).kv_bytes == 3 * GIB, "what there is, it gets"


# Memory that has to come back


def gone(subject: Stage, keeps: str = "") -> list[Effect]:
    """b is wanted; a, which held 6 GiB, is evicted and exits. A model that is used meanwhile stays."""
    subject.ready_model("a")
    subject.do(replace(EASY, workers={"a": 6 * GIB}))
    if keeps:
        subject.acquire("use", keeps)
        subject.wait(1)
        subject.release("use")
    assert one(subject.acquire("r1", "b"), AskStop).model == "a"
    return subject.exit("a", code=0)


def test_the_next_load_starts_when_the_memory_of_the_last_is_seen_to_be_back() -> None:
    subject = stage(cost("a", 6), cost("b", 6), budget=8)
    effects = gone(subject)
    assert only(effects, ReadMemory) and not only(effects, Spawn)
    assert subject.machine.budget().missing_bytes == 6 * GIB
    effects = subject.do(replace(EASY, outside_bytes=13 * GIB))
    assert only(effects, ReadMemory) and not only(effects, Spawn), "3 GiB are not back"
    assert subject.machine.budget().missing_bytes == 3 * GIB
    assert one(subject.do(replace(EASY, outside_bytes=10 * GIB + 100 * MIB)), Spawn).model == "b", "a little is noise"
    assert subject.machine.budget().missing_bytes == 0


def test_memory_that_is_not_needed_for_the_load_is_not_waited_for() -> None:
    subject = stage(cost("a", 6), cost("b", 6))
    assert not only(gone(subject), Spawn)
    assert one(subject.do(replace(EASY, outside_bytes=13 * GIB)), Spawn).model == "b", "4 GiB of the 10 are not needed"


def test_after_ten_seconds_the_load_does_without_what_is_missing_and_says_so() -> None:
    subject = stage(cost("a", 6), cost("b", 6), cost("c", 2))
    subject.ready_model("c")
    gone(subject, keeps="c")
    subject.do(replace(EASY, outside_bytes=13 * GIB))
    effects = subject.wait(9)
    assert not only(effects, AskStop) and not only(effects, Event)
    effects = subject.wait(2)
    [said] = [event for event in only(effects, Event) if event.kind == "memory"]
    assert (said.data["missing_bytes"], said.data["of"]) == (3 * GIB, ["a"])
    assert one(effects, AskStop).model == "c", "10 less 3 hold one of them"
    subject.exit("c", code=0)
    assert subject.state("b") is SlotState.SPAWNING
    assert subject.machine.budget().missing_bytes == 0, "subtracted for that load only"


def test_a_load_that_what_is_missing_leaves_no_room_for_is_refused_with_the_sum() -> None:
    subject = stage(cost("a", 6), cost("b", 6))
    gone(subject)
    subject.do(replace(EASY, outside_bytes=17 * GIB))
    rejected = one(subject.wait(50), Rejected)
    assert rejected.code == "busy" and rejected.retry_after_s
    assert "b needs 6.0 GiB to load; the memory budget is 4.0 GiB" in rejected.message
    assert "6.0 GiB of an unloaded model are not back" in rejected.message


# Other programs


def test_a_budget_that_others_shrink_takes_hot_caches_then_idle_models_and_never_a_busy_one() -> None:
    subject = stage(cost("a", 4, hot=1), cost("b", 4, hot=1))
    subject.ready_model("a")
    subject.ready_model("b")
    subject.acquire("r1", "b")
    effects = subject.do(replace(EASY, budget_bytes=8 * GIB, budget_because="other programs hold 9 GiB"))
    assert {grant.model for grant in only(effects, GrantMemory)} == {"a", "b"} and not only(effects, AskStop)
    effects = subject.do(replace(EASY, budget_bytes=7 * GIB))
    assert one(effects, AskStop).model == "a"
    subject.exit("a", code=0)
    effects = subject.do(replace(EASY, budget_bytes=GIB))
    subject.wait(100)
    assert not only(effects, AskStop) and subject.slot("b").leases == 1
    view = subject.machine.budget()
    assert view.budget_bytes == GIB


def test_a_load_waits_for_other_programs_a_while_and_is_then_told_the_sum() -> None:
    subject = stage(cost("a", 6), budget_detail="16.0 GiB of RAM - 6.0 GiB reserve")
    subject.do(replace(EASY, budget_bytes=5 * GIB, budget_because="other programs hold 11.0 GiB of 16.0 GiB"))
    assert subject.machine.budget().detail == (
        "16.0 GiB of RAM - 6.0 GiB reserve; now less: other programs hold 11.0 GiB of 16.0 GiB"
    )
    assert not only(subject.acquire("r1", "a"), Spawn)
    assert not only(subject.wait(29), Rejected)
    rejected = one(subject.wait(2), Rejected)
    assert rejected.code == "busy" and rejected.message == (
        "a needs 6.0 GiB to load; the memory budget is 5.0 GiB (now, other programs hold 11.0 GiB of 16.0 GiB): "
        "1.0 GiB too much"
    )
    assert subject.state("a") is SlotState.IDLE
    subject.acquire("r2", "a")
    assert one(subject.do(EASY), Spawn).model == "a", "and one that waits is served when they are gone"


# Pressure


def busy_and_idle(**policy: object) -> Stage:
    subject = stage(cost("a", 3, hot=1), cost("b", 2, hot=1), cost("c", 2), budget=10, **policy)
    for model in ("a", "b"):
        subject.ready_model(model)
        hold(subject, model, 1)
    subject.acquire("r1", "a")
    return subject


def test_soft_pressure_trims_and_takes_of_the_hot_caches_what_is_too_much() -> None:
    subject = busy_and_idle()
    effects = subject.do(replace(EASY, level=Level.SOFT, because="x", over_bytes=GIB // 2))
    assert {(trim.model, trim.level) for trim in only(effects, TrimWorker)} == {("a", Level.SOFT), ("b", Level.SOFT)}
    assert one(effects, GrantMemory) == GrantMemory("b", 1, hot_bytes=GIB // 2), "the idle one's"
    assert one(effects, Event).data == {"pressure": "soft", "reason": "x"}
    assert not only(effects, AskStop)
    assert not only(subject.do(replace(EASY, level=Level.SOFT)), TrimWorker), "not every second"
    subject.wait(11)
    assert only(subject.do(replace(EASY, level=Level.SOFT)), TrimWorker), "but again while it lasts"


def test_hard_pressure_asks_busy_workers_for_what_is_too_much_in_proportion_to_their_size() -> None:
    subject = stage(*(cost(model, size) for model, size in (("a", 3), ("b", 1), ("c", 2))), budget=12)
    for model in "abc":
        subject.ready_model(model)
    for model in "ab":
        subject.acquire(f"r-{model}", model)
    effects = subject.do(replace(EASY, level=Level.HARD, over_bytes=GIB))
    assert {trim.model: trim.target_bytes for trim in only(effects, TrimWorker)} == {"a": GIB * 3 // 4, "b": GIB // 4, "c": 0}


def test_soft_pressure_takes_what_hot_caches_hold_and_not_only_what_they_might() -> None:
    subject = stage(cost("a", 2, hot=3), cost("b", 2, hot=3))
    for model in "ab":
        subject.ready_model(model)
        hold(subject, model, 1)
    assert (hot(subject, "a"), hot(subject, "b")) == (3, 3)
    subject.do(replace(EASY, level=Level.SOFT, because="x", over_bytes=GIB))
    assert (hot(subject, "a"), hot(subject, "b")) == (0, 1)


def test_hard_pressure_leaves_a_model_whose_requests_wait_for_a_place() -> None:
    subject = stage(cost("a", 2), cost("b", 2), cost("c", 2), max_total=1)
    for model in "abc":
        subject.ready_model(model)
    subject.acquire("r1", "a")
    subject.acquire("r2", "b")
    assert one(subject.do(HARD), AskStop).model == "c"
    subject.exit("c", code=0)
    assert not only(subject.do(replace(HARD, outside_bytes=0)), AskStop)
    assert one(subject.release("r1"), Granted).rid == "r2"


def test_hard_pressure_lends_nothing_loads_nothing_and_lets_idle_models_go_one_at_a_time() -> None:
    subject = stage(*(cost(model, 2) for model in "abcd"), budget=12)
    for model in "abc":
        subject.ready_model(model)
    subject.acquire("r1", "c")
    assert one(subject.do(HARD), AskStop).model == "a"
    assert not only(subject.do(HARD), AskStop), "first the one that leaves"
    assert one(subject.do(WorkerWants("c", 1, 3 * GIB)), GrantMemory).kv_bytes == GIB, "an answer, but no more"
    assert not only(subject.acquire("r2", "d"), Spawn)
    subject.exit("a", code=0)
    assert one(subject.do(HARD), AskStop).model == "b"
    subject.exit("b", code=0)
    subject.do(HARD)
    subject.wait(10)
    assert subject.slot("c").leases == 1 and not only(subject.all, Lost), "a busy model is never stopped under hard pressure"
    assert one(subject.do(EASY), Spawn).model == "d"
    assert subject.slot("c").kv_granted_bytes == 3 * GIB, "what it asked for is not forgotten"


def test_under_pressure_the_next_idle_model_waits_ten_seconds_for_memory_that_another_program_has_taken() -> None:
    subject = stage(*(cost(model, 2) for model in "abc"))
    for model in "abc":
        subject.ready_model(model)
    subject.do(replace(EASY, workers=dict.fromkeys("abc", 2 * GIB)))
    outside_bytes = EASY.outside_bytes
    for model in "ab":
        short = replace(HARD, outside_bytes=outside_bytes, workers=dict.fromkeys("abc", 2 * GIB))
        assert one(subject.do(short), AskStop).model == model
        subject.exit(model, code=0)
        outside_bytes += 2 * GIB  # what came back is gone at once
        for _ in range(9):
            assert not only(subject.do(replace(short, outside_bytes=outside_bytes)), AskStop)
            assert not only(subject.wait(1), AskStop)
        subject.wait(1.5)
    assert one(subject.do(replace(HARD, outside_bytes=outside_bytes)), AskStop).model == "c"


def test_a_request_for_a_model_that_is_not_loaded_is_told_of_the_pressure_after_a_while() -> None:
    subject = busy_and_idle()
    subject.do(HARD)
    subject.acquire("r2", "c")
    rejected = one(subject.wait(31), Rejected)
    assert (rejected.rid, rejected.code) == ("r2", "busy") and "memory is short: it is full" in rejected.message
    assert one(subject.acquire("r3", "a"), Granted), "a loaded model serves on"


def test_critical_pressure_stops_the_largest_unpinned_model_and_its_clients_are_told() -> None:
    subject = stage(cost("a", 3), cost("b", 2), cost("p", 4, pinned=True))
    for model in "abp":
        subject.ready_model(model)
        subject.acquire(f"r-{model}", model)
    effects = subject.do(replace(CRITICAL, workers={"a": GIB, "b": 3 * GIB, "p": 5 * GIB}))
    lost = one(effects, Lost)
    assert (lost.rid, lost.code) == ("r-b", "oom") and "it is full" in lost.message
    assert one(effects, AskStop).model == "b"
    assert not only(subject.do(CRITICAL), AskStop), "one at a time"
    subject.exit("b", code=0)
    assert one(subject.do(CRITICAL), AskStop).model == "a"
    subject.exit("a", code=0)
    assert not only(subject.do(CRITICAL), AskStop), "a pinned one stays"
    assert subject.slot("a").restarts == subject.slot("b").restarts == 0, "no crash of theirs"


def test_critical_pressure_takes_an_idle_model_before_a_busy_one() -> None:
    subject = busy_and_idle()
    effects = subject.do(CRITICAL)
    assert one(effects, AskStop).model == "b" and not only(effects, Lost)


# The limit of all weights


def test_the_weights_of_all_loaded_models_have_a_limit_of_their_own() -> None:
    heavy = {name: cost(name, 3, weights_bytes=2 * GIB) for name in "abc"}
    subject = stage(*heavy.values(), budget=100, weights_limit_bytes=4 * GIB)
    subject.ready_model("a")
    subject.ready_model("b")
    assert subject.machine.budget().weights_bytes == 4 * GIB
    effects = subject.acquire("r1", "c")
    assert one(effects, AskStop).model == "a" and not only(effects, Spawn)
    assert one(subject.exit("a", code=0), Spawn).model == "c"


def test_a_model_whose_weights_exceed_that_limit_is_refused_at_once() -> None:
    subject = stage(cost("a", 6, weights_bytes=5 * GIB), budget=100, weights_limit_bytes=4 * GIB)
    rejected = one(subject.acquire("r1", "a"), Rejected)
    assert rejected.code == "model_too_large" and "memory.max_model_weights allows 4.0 GiB" in rejected.message


def test_a_meters_reading_and_a_smaller_hot_cache_are_counted_once() -> None:
    subject = stage(cost("a", 4, hot=2))
    subject.ready_model("a")
    subject.do(WorkerMeasured("a", 1, 7 * GIB))
    assert subject.slot("a").charged_bytes == 7 * GIB, "not its grants and the reading"
    hold(subject, "a", 2)
    subject.do(HARD)
    hold(subject, "a", 0)
    assert subject.slot("a").charged_bytes == 5 * GIB
