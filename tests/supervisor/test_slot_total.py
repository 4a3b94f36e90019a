"""A limit for the requests of all models together: who waits, who gets the next place, who is told to come back."""

from __future__ import annotations

from supervisor.slot_events import Abandon, AskStop, Granted, ModelCost, QueuedAt, Rejected, SlotState, WorkerExited
from tests.supervisor.slot_stage import Stage, one, only

A, B = ModelCost("a", 4, ttl_s=60), ModelCost("b", 4)


def two_models(max_total: int, max_queue: int = 4) -> Stage:
    stage = Stage([A, B, ModelCost("c", 4)], max_total=max_total, max_queue=max_queue)
    stage.ready_model("a")
    stage.ready_model("b")
    return stage


def granted(stage: Stage) -> list[str]:
    return [grant.rid for grant in only(stage.all, Granted) if not grant.rid.startswith("up-")]


def test_a_limit_of_one_holds_across_models() -> None:
    stage = two_models(1)
    assert one(stage.acquire("r1", "a"), Granted)
    assert one(stage.acquire("r2", "b"), QueuedAt).position == 1
    assert one(stage.release("r1"), Granted).rid == "r2"


def test_without_a_limit_for_all_each_model_has_only_its_own() -> None:
    stage = Stage([A, B])
    stage.ready_model("a")
    stage.ready_model("b")
    for rid, model in (("r1", "a"), ("r2", "b"), ("r3", "a"), ("r4", "b")):
        assert one(stage.acquire(rid, model), Granted)


def test_models_take_turns_and_each_serves_its_own_in_order() -> None:
    stage = two_models(1, max_queue=9)
    for rid in ("a1", "a2", "a3", "b1", "b2"):
        stage.acquire(rid, rid[0])
    for _ in range(4):
        stage.release(granted(stage)[-1])
    assert granted(stage) == ["a1", "b1", "a2", "b2", "a3"]


def test_beyond_limit_and_queue_a_request_for_any_model_is_told_to_come_back() -> None:
    stage = two_models(1, max_queue=2)
    for rid in ("a1", "b1", "a2"):
        assert not only(stage.acquire(rid, rid[0]), Rejected)
    for model in ("a", "b", "c"):
        refused = one(stage.acquire(f"late-{model}", model), Rejected)
        assert refused.code == "queue_full" and refused.retry_after_s
    assert stage.state("c") is SlotState.IDLE, "one that is refused must not load a model"
    stage.do(Abandon("b1"))
    assert not only(stage.acquire("b2", "b"), Rejected)


def test_the_place_of_a_worker_that_died_is_free_for_others() -> None:
    stage = two_models(1)
    stage.acquire("r1", "a")
    stage.acquire("r2", "b")
    assert one(stage.do(WorkerExited("a", stage.slot("a").gen, 1, None, "")), Granted).rid == "r2"


def test_a_model_that_waits_for_a_place_is_not_idle() -> None:
    stage = two_models(1)
    stage.acquire("long", "b")
    stage.acquire("r1", "a")
    assert not only(stage.wait(200), AskStop), "its time to live runs from the end of the waiting"
    stage.acquire("r2", "c")
    assert not only(stage.all[-5:], AskStop), "it is not evicted as if nobody wanted it"
    assert one(stage.release("long"), Granted).rid == "r1"
