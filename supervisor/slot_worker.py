"""One worker's life, as far as it is decided here: spawned, loading, ready, stopped, crashed, backed off, given up.

Whether a model deserves a worker, and what has to go for it, is decided in slot_loads.py.
"""

from __future__ import annotations

from supervisor import slot_oom, slot_shed
from supervisor.budget import Shortfall, refusal
from supervisor.slot_board import Board
from supervisor.slot_events import (
    AskStop,
    DumpStacks,
    Event,
    Kill,
    SlotState,
    Spawn,
    Terminate,
    WorkerBeat,
    WorkerExited,
    WorkerFault,
    WorkerMeasured,
    WorkerProgress,
    WorkerReady,
)
from supervisor.slot_record import Failure, LoadCall, Slot, StopStep, Worker
from supervisor.slot_timers import Alarm

EXIT_UNLOADABLE = 65  # EX_DATAERR: this model can never load as it is
SIGABRT = 6
METAL_GAVE_UP = "Command buffer execution failed"
SHUTDOWN_S = 20.0
KILL_MARGIN_S = 2.0  # between the last kill and the end of the shutdown, for reaping


def spawn(board: Board, slot: Slot) -> None:
    board.ledger.reserve(slot.model, slot.need_bytes)
    spare_bytes = 0 if board.memory is not None and board.memory.level else max(0, board.ledger.free_bytes)
    hot_bytes = min(slot.cost.hot_bytes, spare_bytes)
    board.ledger.set_hot(slot.model, hot_bytes)
    slot.gen = board.gens[slot.model] = board.gens.get(slot.model, 0) + 1
    slot.worker = Worker(slot.gen, slot.cost.load_key, kv_bytes=slot.cost.kv_bytes, hot_bytes=hot_bytes)
    board.say(Spawn(slot.model, slot.gen))
    board.enter(slot, SlotState.SPAWNING)


def hello(board: Board, slot: Slot, worker: Worker) -> None:
    if slot.state is SlotState.SPAWNING:
        worker.progress_at = board.now
        board.enter(slot, SlotState.LOADING)


def progress(board: Board, slot: Slot, worker: Worker, event: WorkerProgress) -> None:
    if slot.state is not SlotState.LOADING or (event.stage, event.done) == (worker.stage, worker.done):
        return
    worker.stage, worker.done, worker.total = event.stage, event.done, event.total
    worker.progress_at = board.now
    data = {"stage": event.stage, "done": event.done, "total": event.total}
    board.say(Event("progress", slot.model, worker.gen, data))
    board.tell_waiters(slot)


def ready(board: Board, slot: Slot, worker: Worker, event: WorkerReady) -> None:
    if slot.state is not SlotState.LOADING:
        return
    board.ledger.raise_to(slot.model, event.measured_bytes)
    if event.measured_bytes > slot.need_bytes:
        slot.measured_bytes = event.measured_bytes
        slot_oom.remember(board, slot)
    slot.max_inflight = worker.max_inflight = max(1, event.max_inflight)
    slot.probing = False
    slot.last_used = worker.ready_at = worker.beat_at = worker.counter_at = board.now
    if event.measured_bytes > board.policy.budget_bytes:
        sizes = Shortfall(slot.model, event.measured_bytes, "measured", board.policy.budget_bytes, pinned_bytes=0)
        board.end_demand(slot, "model_too_large", refusal(sizes))
        stop(board, slot, worker, "too large")
        return
    board.enter(slot, SlotState.READY)


def beat(board: Board, slot: Slot, worker: Worker, event: WorkerBeat) -> None:
    worker.beat_at = board.now
    moved = event.progress != worker.counter
    if moved:
        worker.progress_at = board.now
    if moved or event.queued == 0 or worker.queued == 0:
        worker.counter_at = board.now
        worker.dumped_at = None
    worker.counter, worker.queued, worker.hot_held_bytes = event.progress, event.queued, event.hot_bytes


def measured(board: Board, slot: Slot, worker: Worker, event: WorkerMeasured) -> None:
    """Before a worker is ready its charge is the estimate, which holds the peaks of the load; a meter can only add to it."""
    worker.measured_bytes = event.size_bytes
    worker.peak_bytes = max(worker.peak_bytes, event.size_bytes)
    board.ledger.raise_to(slot.model, event.size_bytes)


def fault(board: Board, slot: Slot, worker: Worker, event: WorkerFault) -> None:
    data = {"code": event.code, "message": event.message, "fatal": event.fatal}
    board.say(Event("fault", slot.model, worker.gen, data))
    if slot.state is SlotState.STOPPING:
        return
    if event.fatal or worker.ready_at is None:
        worker.fault = Failure(event.code, event.message)
    if event.fatal:
        # It is about to exit: nothing more may be granted meanwhile, and if it does not exit it is made to.
        _condemn(board, slot, worker, Failure(event.code, event.message))
        worker.stop_step, worker.stop_at = StopStep.ASKED, board.now + board.timers.stop_s


def excuse(board: Board, slot: Slot, worker: Worker, gap_s: float) -> None:
    """Nobody listened for a while: what the worker did not say meanwhile is not held against it, and every wait begins anew."""
    worker.beat_at = worker.counter_at = worker.progress_at = board.now
    worker.dumped_at = None
    if slot.state is SlotState.SPAWNING:
        slot.since = board.now
    if worker.stop_at is not None:
        worker.stop_at += gap_s
    if worker.drain_until is not None:
        worker.drain_until += gap_s


# Stopping


def drain(board: Board, slot: Slot, worker: Worker, reason: str, until: float | None = None) -> None:
    """Nothing new is granted; what runs may finish, until a time if one is given."""
    worker.drain_reason = reason
    if until is not None:
        worker.drain_until = until if worker.drain_until is None else min(until, worker.drain_until)
    if slot.state is not SlotState.DRAINING:
        board.enter(slot, SlotState.DRAINING, reason)


def stop(board: Board, slot: Slot, worker: Worker, reason: str) -> None:
    assert not worker.leases
    stop_s = board.timers.stop_s
    if board.shutting_down:
        stop_s = max(0.0, min(stop_s, SHUTDOWN_S - KILL_MARGIN_S - board.timers.term_s))
    if slot.state is SlotState.SPAWNING:  # nobody listens for a stop message yet
        _terminate(board, slot, worker)
    else:
        worker.stop_step, worker.stop_at = StopStep.ASKED, board.now + stop_s
        board.say(AskStop(slot.model, worker.gen, reason, stop_s))
    board.enter(slot, SlotState.STOPPING, reason)


def ring(board: Board, slot: Slot, alarm: Alarm) -> None:
    """One alarm of slot_timers.py is due."""
    worker, timers = slot.worker, board.timers
    if alarm is Alarm.BACKOFF:
        slot.backoff_until = None
        _rest(board, slot, "back-off over")
        return
    assert worker is not None
    match alarm:
        case Alarm.HELLO:
            _kill_as_crashed(board, slot, worker, f"said nothing within {timers.hello_s:g} s of its start")
        case Alarm.LOAD_STALL:
            where = f" at {worker.stage} {worker.done}/{worker.total}" if worker.stage else ""
            _kill_as_crashed(board, slot, worker, f"load stalled{where}: no progress for {timers.load_stall_s:g} s")
        case Alarm.BEAT_LOST:
            _kill_as_crashed(board, slot, worker, f"heartbeat lost for {timers.beat_lost_s:g} s")
        case Alarm.NO_PROGRESS:
            worker.dumped_at = board.now
            board.say(DumpStacks(slot.model, worker.gen))
        case Alarm.DUMPED:
            _kill_as_crashed(board, slot, worker, f"stalled: no progress for {timers.no_progress_s:g} s with work queued")
        case Alarm.TTL if board.line.first(slot.model) is not None:
            slot.last_used = board.now  # only the limit for all models together keeps it idle
        case Alarm.TTL:
            stop(board, slot, worker, f"idle for {slot.cost.ttl_s:g} s")
        case Alarm.DRAIN:
            board.lose_leases(slot, "model_unloaded", f"{slot.model} was unloaded")
            stop(board, slot, worker, worker.drain_reason)
        case Alarm.STOP if worker.stop_step is StopStep.ASKED:
            _terminate(board, slot, worker)
        case _:
            _kill(board, slot, worker)


def _terminate(board: Board, slot: Slot, worker: Worker) -> None:
    worker.stop_step, worker.stop_at = StopStep.TERMINATED, board.now + board.timers.term_s
    board.say(Terminate(slot.model, worker.gen))


def _kill(board: Board, slot: Slot, worker: Worker) -> None:
    worker.stop_step, worker.stop_at = StopStep.KILLED, None
    board.say(Kill(slot.model, worker.gen))


def _kill_as_crashed(board: Board, slot: Slot, worker: Worker, message: str) -> None:
    _condemn(board, slot, worker, Failure("worker_lost", message))
    _kill(board, slot, worker)


def _condemn(board: Board, slot: Slot, worker: Worker, failure: Failure) -> None:
    worker.failure = failure
    _die_under_leases(board, slot, worker, failure)
    board.enter(slot, SlotState.STOPPING, failure.message)


def _die_under_leases(board: Board, slot: Slot, worker: Worker, failure: Failure) -> None:
    for lease in worker.leases.values():
        board.suspects.died(slot.model, lease.request_hash, lease.alone, board.now)
    board.lose_leases(slot, failure.code, failure.message)


# The end of a worker


def exited(board: Board, slot: Slot, worker: Worker, event: WorkerExited) -> None:
    asked = slot.state is SlotState.STOPPING and worker.failure is None
    failure = worker.failure or worker.fault or _death(event)
    if not asked and slot_oom.ran_out(worker, event):
        failure = slot_oom.learn(board, slot, worker, _how(event))
    if not asked:
        _die_under_leases(board, slot, worker, failure)
    slot.worker = None
    board.ledger.release(slot.model)
    board.answer_unloads(slot)
    if asked or board.shutting_down or slot.removed:
        _rest(board, slot, _how(event))
    else:
        unloadable = event.code == EXIT_UNLOADABLE and worker.ready_at is None
        _crashed(board, slot, failure, event, unloadable)
        if not unloadable:
            slot_shed.died(board, slot, worker)


def _crashed(board: Board, slot: Slot, failure: Failure, event: WorkerExited, unloadable: bool) -> None:
    timers, now = board.timers, board.now
    slot.last_error = "\n".join(part for part in (failure.message, event.tail.strip()) if part)
    slot.restarts += 1
    slot.streak = slot.streak + 1 if slot.crashes and now - slot.crashes[-1] <= timers.crash_window_s else 1
    slot.crashes = [at for at in slot.crashes if now - at < timers.crash_window_s] + [now]
    if unloadable:
        reason = _said(event) if failure.message == _how(event) else failure.message
        give_up(board, slot, Failure("model_unloadable", f"{slot.model} cannot be loaded: {reason}"))
    elif failure.code == slot_oom.OOM and slot_oom.is_hopeless(slot):
        give_up(board, slot, Failure("model_failed", failure.message))
    elif slot.probing or len(slot.crashes) >= timers.crash_limit:
        give_up(board, slot, Failure("model_failed", _quarantine(slot, failure, timers.probe_after_s)))
    else:
        if slot.pinned and board.demand(slot) is None:
            slot.load_calls.append(LoadCall(None, board.next_seq(), now))  # a pinned model comes back unasked
        # The exponent is bounded because a float overflows long before a patient crash loop ends.
        slot.backoff_until = now + min(timers.backoff_max_s, timers.backoff_first_s * 2.0 ** min(slot.streak - 1, 30))
        board.enter(slot, SlotState.BACKOFF, failure.message)


def _quarantine(slot: Slot, failure: Failure, probe_after_s: float) -> str:
    return (
        f"{slot.model} is quarantined after {len(slot.crashes)} crashes, the last one: {failure.message}; "
        f"it is tried once more after {probe_after_s:g} s, or after: omlxctl reset {slot.model}"
    )


def give_up(board: Board, slot: Slot, failure: Failure) -> None:
    slot.failed = failure
    slot.probing = False
    slot.probe_at = board.now + board.timers.probe_after_s
    board.enter(slot, SlotState.FAILED, failure.message)
    board.end_demand(slot, failure.code, failure.message, retry_after_s(board, slot))


def retry_after_s(board: Board, slot: Slot) -> float | None:
    """When a failed model will be probed; None for one that only a change of its files can help."""
    if slot.probe_at is None or (slot.failed is not None and slot.failed.code == "model_unloadable"):
        return None
    return max(0.0, slot.probe_at - board.now)


def _rest(board: Board, slot: Slot, reason: str) -> None:
    """No worker and nothing to be held against a new one."""
    if slot.removed:
        board.enter(slot, SlotState.IDLE, "removed")
        del board.slots[slot.model]
    elif board.demand(slot) is not None:
        board.enter(slot, SlotState.QUEUED, reason)
    else:
        board.enter(slot, SlotState.IDLE, reason)


def _said(event: WorkerExited) -> str:
    """The last thing a worker that reported no fault wrote before it exited."""
    lines = event.tail.strip().splitlines()
    return lines[-1] if lines else _how(event)


def _death(event: WorkerExited) -> Failure:
    """MLX aborts the process for what Metal tells it outside of a step; the reason is in its last words."""
    line = next((line for line in event.tail.splitlines() if METAL_GAVE_UP in line), None)
    if event.signal != SIGABRT or line is None:
        return Failure("worker_lost", _how(event))
    return Failure("gpu_fault", f"{_how(event)}: {line.strip()}")


def _how(event: WorkerExited) -> str:
    if event.signal is not None:
        return f"the worker was killed by signal {event.signal}"
    return f"the worker exited with code {event.code}"
