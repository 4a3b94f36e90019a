"""What the machine does with memory that workers share: hot caches shrink and grow, KV is lent, pressure is relieved.

Reclaim before evict, evict before anybody waits: a hot cache is only speed, an idle model only a load. Only critical
pressure ends a busy model.
"""

from __future__ import annotations

from collections.abc import Iterator

from supervisor import slot_shortage, slot_worker
from supervisor.pressure import Level
from supervisor.slot_board import Board
from supervisor.slot_events import Event, GrantMemory, MemoryRead, SlotState, TrimWorker, WorkerWants
from supervisor.slot_record import Slot, Worker
from supervisor.slot_view import BudgetView

TRIM_EVERY_S = 10.0
HOT_REST_S = 10.0  # a hot cache that had to shrink does not grow again for so long
WANT_LASTS_S = 15.0  # a worker that still needs what it asked for asks again after 5 s


def read(board: Board, event: MemoryRead) -> None:
    previous, board.memory = board.memory, event
    board.ledger.budget_bytes = min(board.policy.budget_bytes, event.budget_bytes)
    slot_shortage.look_for_missing(board, event)
    if previous is None or previous.level is not event.level:
        data = {"pressure": event.level.name.lower(), "reason": event.because}
        if previous is not None or event.level:
            board.say(Event("memory", None, 0, data))
    if event.level and not board.shutting_down:
        _relieve(board, event, rose=previous is None or event.level > previous.level)


def level(board: Board) -> Level:
    return board.memory.level if board.memory else Level.NONE


def weights_bytes(board: Board) -> int:
    return sum(slot.cost.weights_bytes for slot in board.slots.values() if slot.worker is not None)


def view(board: Board) -> BudgetView:
    ledger, memory = board.ledger, board.memory
    why = memory.budget_because if memory is not None and memory.budget_bytes < board.policy.budget_bytes else ""
    detail = board.policy.budget_detail
    return BudgetView(
        budget_bytes=ledger.budget_bytes,
        charged_bytes=ledger.charged_bytes,
        missing_bytes=ledger.missing_bytes,
        weights_bytes=weights_bytes(board),
        level=level(board),
        because=memory.because if memory is not None else "",
        detail=f"{detail}; now less: {why}" if why else detail,
    )


def forget_peak(board: Board, slot: Slot) -> None:
    """Somebody says that it will not be so large again."""
    if slot.worker is not None and slot.worker.measured_bytes:
        board.ledger.forget_peak(slot.model, slot.worker.measured_bytes)


# Hot caches


def coming_back_bytes(board: Board) -> int:
    """What is worth waiting for: an exit's memory, for a while, and hot caches that were told to shrink."""
    owed = board.ledger.missing_bytes if board.debt is not None and not board.debt.overdue else 0
    return owed + sum(
        board.ledger.hot_bytes(slot.model) - slot.worker.hot_bytes
        for slot in board.slots.values()
        if slot.worker is not None and slot.state is not SlotState.STOPPING
    )


def shrink_hot(board: Board, needed_bytes: int) -> int:
    """Takes it from hot caches: what they do not hold first, then the least recently used. Returns what will come of it.

    A charge falls when the worker says that it holds no more than it may.
    """
    taken_bytes = 0
    workers = sorted(_with_hot(board), key=lambda pair: (bool(pair[1].leases), pair[0].last_used))
    for floor in ("held", "nothing"):
        for slot, worker in workers:
            keep_bytes = worker.hot_held_bytes if floor == "held" else 0
            take_bytes = min(needed_bytes - taken_bytes, worker.hot_bytes - keep_bytes)
            if take_bytes > 0:
                taken_bytes += take_bytes
                grant_hot(board, slot, worker, worker.hot_bytes - take_bytes)
    if taken_bytes:
        board.hot_rests_until = board.now + HOT_REST_S
    return taken_bytes


def shrinkable_bytes(board: Board) -> int:
    return sum(worker.hot_bytes for _, worker in _with_hot(board))


def grant_hot(board: Board, slot: Slot, worker: Worker, size_bytes: int) -> None:
    worker.hot_bytes = size_bytes
    board.say(GrantMemory(slot.model, worker.gen, hot_bytes=size_bytes))
    settle_hot(board, slot, worker)


def settle_hot(board: Board, slot: Slot, worker: Worker) -> None:
    charged_bytes = board.ledger.hot_bytes(slot.model)
    if worker.hot_bytes > charged_bytes or worker.hot_held_bytes <= worker.hot_bytes < charged_bytes:
        board.ledger.set_hot(slot.model, worker.hot_bytes)


def grow_hot(board: Board) -> None:
    """What nobody needs, to the most recently used first."""
    if board.now < board.hot_rests_until or level(board):
        return
    for slot, worker in sorted(_growing(board), key=lambda pair: -pair[0].last_used):
        free_bytes = board.ledger.free_bytes
        if free_bytes > 0:
            grant_hot(board, slot, worker, min(slot.cost.hot_bytes, worker.hot_bytes + free_bytes))


def _with_hot(board: Board) -> Iterator[tuple[Slot, Worker]]:
    for slot in board.slots.values():
        if slot.worker is not None and slot.state is not SlotState.STOPPING and slot.worker.hot_bytes > 0:
            yield slot, slot.worker


def _growing(board: Board) -> Iterator[tuple[Slot, Worker]]:
    """One whose cache is still shrinking is not told to grow."""
    for slot in board.slots.values():
        worker = slot.worker
        if slot.state is not SlotState.READY or worker is None or slot.stale or worker.hot_bytes >= slot.cost.hot_bytes:
            continue
        if board.ledger.hot_bytes(slot.model) == worker.hot_bytes:
            yield slot, worker


# KV


def want(board: Board, slot: Slot, worker: Worker, event: WorkerWants) -> None:
    if event.kv_bytes < worker.kv_bytes:
        _take_back(board, slot, worker, event.kv_bytes)
        return
    worker.wants_kv_bytes, worker.wanted_at = event.kv_bytes, board.now
    worker.owed_answer = True  # though it get nothing: it waits, to know whether it has to put something aside
    lend(board)


def _take_back(board: Board, slot: Slot, worker: Worker, kv_bytes: int) -> None:
    keep_bytes = max(kv_bytes, slot.cost.kv_bytes)
    board.ledger.lend(slot.model, keep_bytes - worker.kv_bytes)
    worker.kv_bytes, worker.wants_kv_bytes = keep_bytes, 0
    worker.owed_answer = True


def lend(board: Board) -> None:
    """What no worker is charged for is one pool; who has waited longest for KV gets of it first, as much as there is."""
    if level(board) >= Level.HARD:
        return
    for slot, worker, more_bytes in _wanting(board):
        if more_bytes > board.ledger.free_bytes:
            shrink_hot(board, more_bytes - board.ledger.free_bytes - coming_back_bytes(board))
        given_bytes = min(more_bytes, board.ledger.free_bytes)
        if given_bytes > 0:
            board.ledger.lend(slot.model, given_bytes)
            worker.kv_bytes += given_bytes
            worker.owed_answer = True


def answer(board: Board) -> None:
    """Says what has been lent, after all that makes room for more has begun."""
    makes_room = coming_back_bytes(board) > 0 or any(slot.state is SlotState.STOPPING for slot in board.slots.values())
    waiting = {slot.model for slot, _, _ in _wanting(board)} if makes_room and level(board) < Level.HARD else set[str]()
    for slot in board.slots.values():
        if slot.worker is not None and slot.worker.owed_answer:
            slot.worker.owed_answer = False
            more_soon = slot.model in waiting
            board.say(GrantMemory(slot.model, slot.worker.gen, kv_bytes=slot.worker.kv_bytes, more_soon=more_soon))


def wanted_bytes(board: Board) -> int:
    """KV that workers have asked for and not got."""
    return 0 if level(board) >= Level.HARD else sum(more_bytes for _, _, more_bytes in _wanting(board))


def _wanting(board: Board) -> list[tuple[Slot, Worker, int]]:
    found = [
        (slot, slot.worker, slot.worker.wants_kv_bytes - slot.worker.kv_bytes)
        for slot in board.slots.values()
        if slot.worker is not None and slot.state in (SlotState.READY, SlotState.DRAINING)
    ]
    found = [(s, w, more) for s, w, more in found if more > 0 and board.now - w.wanted_at < WANT_LASTS_S]
    return sorted(found, key=lambda each: each[1].wanted_at)


def alarms(board: Board) -> Iterator[float]:
    if board.ledger.free_bytes > 0 and any(True for _ in _growing(board)):
        yield board.hot_rests_until


# Pressure


def _relieve(board: Board, event: MemoryRead, rose: bool) -> None:
    if rose or board.now - board.trimmed_at >= TRIM_EVERY_S:
        board.trimmed_at = board.now
        _trim(board, event)
        # What is granted and not held is in nobody's memory: to take only that would relieve nothing.
        soft_bytes = event.over_bytes + sum(max(0, worker.hot_bytes - worker.hot_held_bytes) for _, worker in _with_hot(board))
        shrink_hot(board, soft_bytes if event.level is Level.SOFT else shrinkable_bytes(board))
    board.hot_rests_until = board.now + HOT_REST_S
    # Memory that is not back in time somebody else has taken: the next one need not wait for it.
    awaited = board.debt is not None and not board.debt.overdue
    leaving = awaited or any(slot.state is SlotState.STOPPING for slot in board.slots.values())
    if event.level >= Level.HARD and not leaving and not _stop_idle(board) and event.level is Level.CRITICAL:
        _stop_largest(board, event)


def _trim(board: Board, event: MemoryRead) -> None:
    """From hard pressure on every busy worker gives its share of what is too much: an idle one's memory comes with its exit."""
    live = [
        (slot, slot.worker)
        for slot in board.slots.values()
        if slot.worker is not None and slot.state in (SlotState.READY, SlotState.DRAINING)
    ]
    busy_bytes = sum(board.ledger.charge_bytes(slot.model) for slot, worker in live if worker.leases)
    for slot, worker in live:
        asked = event.level >= Level.HARD and worker.leases
        share_bytes = event.over_bytes * board.ledger.charge_bytes(slot.model) // busy_bytes if asked else 0
        board.say(TrimWorker(slot.model, worker.gen, event.level, share_bytes))


def _stop_idle(board: Board) -> bool:
    idle = [slot for slot in board.slots.values() if slot.idle and not slot.pinned and board.line.first(slot.model) is None]
    if not idle:
        return False
    slot = min(idle, key=lambda each: each.last_used)
    assert slot.worker is not None
    slot_worker.stop(board, slot, slot.worker, "memory is short")
    return True


def _stop_largest(board: Board, event: MemoryRead) -> None:
    live = [slot for slot in board.slots.values() if slot.worker is not None and not slot.pinned]
    if not live:
        return
    slot = max(live, key=lambda each: (event.workers.get(each.model, 0), board.ledger.charge_bytes(each.model)))
    assert slot.worker is not None
    board.lose_leases(slot, "oom", f"{slot.model} was stopped before the machine ran out of memory: {event.because}")
    slot_worker.stop(board, slot, slot.worker, "memory is critical")
