"""Crashes, back-off, liveness and poison requests."""

from __future__ import annotations

from supervisor.slot_events import (
    CallDone,
    DumpStacks,
    Granted,
    Kill,
    LoadRequested,
    Lost,
    ModelCost,
    ModelsChanged,
    QueuedAt,
    Rejected,
    ResetRequested,
    SlotState,
    Spawn,
    UnloadRequested,
    WorkerBeat,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerProgress,
)
from supervisor.slot_rules import Timers
from tests.supervisor.slot_stage import Stage, one, only

A = ModelCost("a", 6)


def crash(stage: Stage, model: str = "a") -> None:
    stage.exit(model, code=1, tail="Traceback\nRuntimeError: boom")


def fail(stage: Stage) -> None:
    """Crash until the machine gives the model up."""
    stage.do(LoadRequested("a", None))
    while stage.state("a") is not SlotState.FAILED:
        crash(stage)
        stage.wait(4)


def test_a_crash_loses_its_leases_frees_the_ledger_and_backs_off() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    effects = stage.exit("a", signal=9)
    assert (one(effects, Lost).rid, one(effects, Lost).code) == ("r1", "worker_lost")
    assert "signal 9" in one(effects, Lost).message
    assert stage.machine.budget().charged_bytes == 0
    assert stage.state("a") is SlotState.BACKOFF and stage.slot("a").backoff_until == stage.now + 1


def test_a_worker_that_metal_aborts_is_called_a_gpu_fault_or_out_of_memory_by_its_last_words() -> None:
    said = "libc++abi: terminating due to uncaught exception: [METAL] Command buffer execution failed: {}\nmore"
    for why, code in (("Caused GPU Hang Error (00000003:…)", "gpu_fault"), ("Insufficient Memory (00000008:…)", "oom")):
        stage = Stage([A])
        stage.acquire("r1", "a")
        stage.come_up("a")
        lost = one(stage.exit("a", signal=6, tail=said.format(why)), Lost)
        assert lost.code == code and "\nmore" not in lost.message
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    assert one(stage.exit("a", signal=9, tail=said.format("of another life")), Lost).code == "worker_lost"


def test_a_request_during_back_off_waits_and_is_served_by_the_next_worker() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    crash(stage)
    effects = stage.acquire("r1", "a")
    assert one(effects, QueuedAt).state is SlotState.BACKOFF and not only(effects, Spawn)
    assert one(stage.wait(1), Spawn).gen == 2
    assert one(stage.come_up("a"), Granted).rid == "r1"


def test_a_back_off_nobody_waits_in_ends_idle() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    crash(stage)
    stage.wait(1)
    assert stage.state("a") is SlotState.IDLE


def test_the_back_off_doubles_up_to_its_limit() -> None:
    stage = Stage([A], timers=Timers(crash_limit=1000))
    stage.do(LoadRequested("a", None))
    waits: list[float] = []
    for _ in range(9):
        crash(stage)
        until = stage.slot("a").backoff_until
        assert until is not None
        waits.append(until - stage.now)
        stage.wait(waits[-1])
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_three_crashes_in_the_window_fail_the_model_with_its_last_lines() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    for expected in (SlotState.BACKOFF, SlotState.BACKOFF, SlotState.FAILED):
        crash(stage)
        assert stage.state("a") is expected
        stage.wait(2)
    rejected = one(stage.all, Rejected)
    assert rejected.code == "model_failed" and rejected.retry_after_s == 600
    assert "RuntimeError: boom" in stage.slot("a").last_error
    later = one(stage.acquire("r2", "a"), Rejected)
    assert later.code == "model_failed" and later.retry_after_s == 598
    assert one(stage.do(LoadRequested("a", "c1")), CallDone).code == "model_failed"


def test_a_healthy_start_does_not_reset_the_window() -> None:
    stage = Stage([A])
    for _ in range(3):
        stage.ready_model("a")
        crash(stage)
        stage.wait(5)
    assert stage.state("a") is SlotState.FAILED


def test_crashes_further_apart_than_the_window_do_not_fail_the_model() -> None:
    stage = Stage([A])
    for _ in range(5):
        stage.ready_model("a")
        stage.wait(301)
        crash(stage)
        assert stage.slot("a").backoff_until == stage.now + 1
        stage.wait(5)


def test_a_load_call_waits_through_back_off_and_hears_of_the_failure() -> None:
    stage = Stage([A])
    stage.do(LoadRequested("a", "c1"))
    crash(stage)
    assert not only(stage.all, CallDone)
    fail(stage)
    assert one(stage.all, CallDone).code == "model_failed"


def test_exit_65_while_loading_fails_at_once_with_the_workers_reason() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.do(WorkerHello("a", 1))
    stage.do(WorkerFault("a", 1, "bad_model", "shard 2 is truncated", fatal=True))
    effects = stage.exit("a", code=65)
    rejected = one(effects, Rejected)
    assert rejected.code == "model_unloadable" and "shard 2 is truncated" in rejected.message
    assert rejected.retry_after_s is None and stage.state("a") is SlotState.FAILED


def test_exit_65_without_a_fault_gives_the_last_line_written() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    effects = stage.exit("a", code=65, tail="Traceback\nunknown architecture: foo\n")
    assert "unknown architecture: foo" in one(effects, Rejected).message


def test_exit_65_of_a_worker_that_was_ready_is_an_ordinary_crash() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.exit("a", code=65)
    assert stage.state("a") is SlotState.BACKOFF


def test_a_failed_model_gets_one_probe_after_its_time() -> None:
    stage = Stage([A])
    fail(stage)
    stage.wait(600)
    assert one(stage.acquire("r1", "a"), Spawn)
    crash(stage)
    assert stage.state("a") is SlotState.FAILED
    assert one(stage.all, Rejected).retry_after_s == 600


def test_a_probe_that_succeeds_serves() -> None:
    stage = Stage([A])
    fail(stage)
    stage.wait(600)
    stage.acquire("r1", "a")
    assert one(stage.come_up("a"), Granted)
    stage.release("r1")
    crash(stage)
    assert stage.state("a") is SlotState.BACKOFF


def test_a_reset_forgets_the_failure() -> None:
    stage = Stage([A])
    fail(stage)
    assert one(stage.do(ResetRequested("a", "c1")), CallDone).ok
    assert stage.state("a") is SlotState.IDLE and stage.slot("a").last_error == ""
    assert one(stage.acquire("r1", "a"), Spawn)


def test_a_reset_ends_a_back_off() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    crash(stage)
    assert one(stage.do(ResetRequested("a", None)), Spawn)


def test_changed_load_settings_clear_the_failure_and_other_changes_do_not() -> None:
    stage = Stage([A])
    fail(stage)
    stage.do(ModelsChanged((ModelCost("a", 5),)))
    assert stage.state("a") is SlotState.FAILED
    stage.do(ModelsChanged((ModelCost("a", 5, load_key="new"),)))
    assert stage.state("a") is SlotState.IDLE


def test_an_out_of_memory_death_says_so() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.do(WorkerFault("a", 1, "oom", "cannot allocate 3 GiB", fatal=True))
    stage.exit("a", signal=6)
    lost = one(stage.all, Lost)
    assert (lost.code, lost.message) == ("oom", "cannot allocate 3 GiB")
    assert stage.state("a") is SlotState.BACKOFF


def test_nothing_is_granted_to_a_worker_that_announced_its_end_and_it_is_killed_if_it_stays() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(WorkerFault("a", 1, "gpu_fault", "", fatal=True))
    assert not only(stage.acquire("r1", "a"), Granted)
    assert one(stage.wait(13), Kill)
    stage.exit("a", signal=9)
    assert stage.state("a") is SlotState.BACKOFF


def test_a_fault_that_is_not_fatal_changes_nothing() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(WorkerFault("a", 1, "cache_unwritable", "read-only", fatal=False))
    assert stage.state("a") is SlotState.READY


def test_a_worker_that_never_says_hello_is_killed_as_crashed() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    assert not only(stage.wait(19.9), Kill)
    assert one(stage.wait(0.1), Kill)
    stage.exit("a", signal=9)
    assert stage.state("a") is SlotState.BACKOFF and "said nothing" in stage.slot("a").last_error


def test_a_load_is_killed_only_after_no_progress() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.do(WorkerHello("a", 1))
    for done in range(5):
        stage.do(WorkerProgress("a", 1, "weights", done, 10))
        assert not only(stage.wait(100), Kill)
    stage.do(WorkerProgress("a", 1, "weights", 4, 10))
    assert not only(stage.wait(19), Kill)
    assert one(stage.wait(1), Kill)
    assert stage.exit("a", signal=9) and "weights 4/10" in stage.slot("a").last_error


def test_a_load_that_only_shows_in_its_beats_is_progress_too() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.do(WorkerHello("a", 1))
    for loaded in range(5):
        stage.do(WorkerBeat("a", 1, loaded, 0))
        assert not only(stage.wait(100), Kill)


def test_a_lost_heartbeat_is_a_crash() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.beating.clear()
    assert not only(stage.wait(29.9), Kill)
    effects = stage.wait(0.1)
    assert one(effects, Kill) and one(effects, Lost).code == "worker_lost"
    stage.exit("a", signal=9)
    assert stage.state("a") is SlotState.BACKOFF and "heartbeat" in stage.slot("a").last_error


def beat_for(stage: Stage, seconds: int, *, progress: int, queued: int) -> None:
    for _ in range(seconds):
        stage.wait(1)
        stage.do(WorkerBeat("a", stage.slot("a").gen, progress, queued))


def test_an_engine_that_stands_still_with_work_queued_is_dumped_and_killed() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.beating.clear()
    beat_for(stage, 180, progress=7, queued=1)
    assert not only(stage.all, DumpStacks)
    beat_for(stage, 1, progress=7, queued=1)
    assert one(stage.all, DumpStacks) and not only(stage.all, Kill)
    stage.wait(1)
    assert one(stage.all, Kill) and "stalled" in one(stage.all, Lost).message


def test_an_engine_that_moves_again_after_the_dump_is_spared() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    stage.beating.clear()
    beat_for(stage, 181, progress=7, queued=1)
    stage.wait(0.5)
    stage.do(WorkerBeat("a", 1, 8, 1))
    beat_for(stage, 5, progress=8, queued=1)
    assert one(stage.all, DumpStacks) and not only(stage.all, Kill)


def test_an_idle_engine_may_stand_still() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.beating.clear()
    beat_for(stage, 500, progress=7, queued=0)
    beat_for(stage, 179, progress=7, queued=1)
    assert not only(stage.all, DumpStacks) and not only(stage.all, Kill)


def test_an_idle_engine_between_two_beats_is_not_stalled_however_short_the_limit() -> None:
    stage = Stage([A], timers=Timers(no_progress_s=5))
    stage.ready_model("a")
    stage.do(WorkerBeat("a", 1, 7, 0))
    stage.beating.clear()
    assert not only(stage.wait(20), DumpStacks)


def test_a_request_whose_worker_was_lost_may_ask_again_under_its_name() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a")
    stage.come_up("a")
    crash(stage)
    assert one(stage.acquire("r1", "a"), QueuedAt)


def test_the_events_of_an_earlier_worker_are_ignored() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    crash(stage)
    stage.acquire("r1", "a")
    stage.wait(1)
    for event in (WorkerHello("a", 1), WorkerExited("a", 1, 0, None, ""), WorkerBeat("a", 1, 1, 1), WorkerHello("zzz", 1)):
        assert stage.do(event) == []
    assert stage.state("a") is SlotState.SPAWNING


def test_an_exit_that_was_asked_for_is_no_crash_whatever_its_code() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.do(UnloadRequested("a", None, force=False))
    stage.exit("a", code=1)
    assert stage.state("a") is SlotState.IDLE and stage.slot("a").restarts == 0


def test_a_crash_while_draining_ends_the_unload() -> None:
    stage = Stage([A])
    stage.ready_model("a")
    stage.acquire("r1", "a")
    stage.do(UnloadRequested("a", "c1", force=False))
    effects = stage.exit("a", signal=11)
    assert one(effects, Lost).code == "worker_lost" and one(effects, CallDone).ok


def die_with(stage: Stage, *hashes: str) -> None:
    """Bring a worker up under these requests and let it crash."""
    for number, request_hash in enumerate(hashes):
        stage.acquire(f"{stage.now}-{number}", "a", request_hash=request_hash)
    stage.wait(60)
    if stage.state("a") is SlotState.SPAWNING:
        stage.come_up("a", max_inflight=8)
    stage.exit("a", signal=11)


PATIENT = Timers(crash_limit=100, hello_s=1000)


def test_after_a_death_the_survivors_run_alone() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1", "h2")
    stage.acquire("r1", "a", request_hash="h1")
    stage.acquire("r2", "a", request_hash="h2")
    stage.acquire("r3", "a", request_hash="h3")
    stage.wait(60)
    assert [granted.rid for granted in only(stage.come_up("a"), Granted)] == ["r1"]
    assert [granted.rid for granted in only(stage.release("r1"), Granted)] == ["r2"]
    assert [granted.rid for granted in only(stage.release("r2"), Granted)] == ["r3"]


def test_a_suspect_waits_until_the_worker_is_empty_and_holds_back_those_behind_it() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1")
    stage.wait(1)
    stage.ready_model("a")
    stage.acquire("r1", "a", request_hash="other")
    effects = stage.acquire("suspect", "a", request_hash="h1")
    assert one(effects, QueuedAt).state is SlotState.READY
    assert not only(stage.acquire("r3", "a"), Granted)
    assert [granted.rid for granted in only(stage.release("r1"), Granted)] == ["suspect"]
    assert [granted.rid for granted in only(stage.release("suspect"), Granted)] == ["r3"]


def test_a_request_that_dies_alone_is_refused() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1", "h2")
    die_with(stage, "h1", "h1")
    assert [lost.code for lost in only(stage.all, Lost)] == ["worker_lost", "worker_lost", "poison"]
    rejected = one(stage.acquire("r1", "a", request_hash="h1"), Rejected)
    assert rejected.code == "poison" and rejected.retry_after_s is None
    stage.wait(60)
    stage.come_up("a")
    assert [rejected.code for rejected in only(stage.all, Rejected)] == ["poison", "poison"]
    assert one(stage.acquire("r2", "a", request_hash="h2"), Granted)


def test_a_first_death_condemns_nobody_also_when_only_one_request_ran() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1")
    stage.acquire("r1", "a", request_hash="h1")
    stage.wait(60)
    assert one(stage.come_up("a"), Granted).rid == "r1"


def test_a_suspect_that_completes_is_cleared() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1")
    stage.acquire("r1", "a", request_hash="h1")
    stage.wait(60)
    stage.come_up("a")
    stage.release("r1", ok=True)
    stage.acquire("r2", "a")
    assert one(stage.acquire("r3", "a", request_hash="h1"), Granted)


def test_a_suspect_that_was_cancelled_stays_one() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "h1")
    stage.acquire("r1", "a", request_hash="h1")
    stage.wait(60)
    stage.come_up("a")
    stage.release("r1", ok=False)
    stage.acquire("r2", "a")
    assert not only(stage.acquire("r3", "a", request_hash="h1"), Granted)


def test_requests_without_a_hash_are_never_suspected() -> None:
    stage = Stage([A], timers=PATIENT)
    die_with(stage, "", "")
    die_with(stage, "", "")
    stage.acquire("r1", "a")
    stage.acquire("r2", "a")
    stage.wait(60)
    assert len(only(stage.come_up("a"), Granted)) == 2


def test_a_forced_unload_makes_nobody_a_suspect() -> None:
    stage = Stage([A])
    stage.acquire("r1", "a", request_hash="h1")
    stage.come_up("a")
    stage.do(UnloadRequested("a", None, force=True))
    stage.exit("a", code=0)
    stage.acquire("r2", "a", request_hash="h1")
    stage.acquire("r3", "a", request_hash="h1")
    assert len(only(stage.come_up("a"), Granted)) == 2


def test_condemned_requests_are_forgotten_by_a_reset_and_by_time() -> None:
    for forget in ("reset", "time"):
        stage = Stage([A], timers=PATIENT)
        die_with(stage, "h1")
        die_with(stage, "h1")
        assert one(stage.acquire("r1", "a", request_hash="h1"), Rejected)
        if forget == "reset":
            stage.do(ResetRequested("a", None))
        else:
            stage.wait(600)
        assert not only(stage.acquire("r2", "a", request_hash="h1"), Rejected)
