"""Which model is loaded next, what goes to make room for it, and who is granted a worker that is there.

One load at a time over all models, in the order their oldest demand arrived. Idle models go first, least recently used
first; busy ones only drain, only for a demand that has waited long enough, and no model goes right after its load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from supervisor import slot_memory, slot_shortage, slot_worker
from supervisor.budget import Shortfall, refusal, weights_refusal
from supervisor.pool import Victim, choose_victims
from supervisor.slot_board import Board
from supervisor.slot_events import SlotState
from supervisor.slot_poison import POISON_MESSAGE, Verdict
from supervisor.slot_record import Slot, Worker

FAIR = "fair"
HELD_RETRY_S = 2.0  # a start takes about as long


def advance(board: Board) -> None:
    """Everything that has become possible: leave, grant, finish draining, load."""
    for slot in tuple(board.slots.values()):
        if slot.state is SlotState.QUEUED and board.demand(slot) is None:
            board.enter(slot, SlotState.IDLE, "nobody waits any more")
        if slot.worker is not None:
            _settle(board, slot, slot.worker)
    grant_waiting(board)
    if not board.shutting_down:
        _load_next(board)
        _resume(board)
        _repay_overdraft(board)
        if _head(board) is None:
            slot_memory.lend(board)
            slot_memory.grow_hot(board)
    slot_memory.answer(board)


def _settle(board: Board, slot: Slot, worker: Worker) -> None:
    leaving = "removed" if slot.removed else "stale" if slot.stale else ""
    if leaving and slot.loading:
        slot_worker.stop(board, slot, worker, leaving)
    elif leaving and slot.state is SlotState.READY:
        slot_worker.drain(board, slot, worker, leaving)
    if slot.state is SlotState.READY:
        board.answer_loads(slot)
    if slot.state is SlotState.DRAINING and not worker.leases:
        slot_worker.stop(board, slot, worker, worker.drain_reason)


def grant_waiting(board: Board) -> None:
    """Per model in order of arrival, up to what its worker takes; where all models share a limit they take turns."""
    takers = [slot for slot in board.slots.values() if board.line.first(slot.model) is not None]
    while takers and board.has_place:
        slot = min(takers, key=lambda taker: taker.granted_seq)
        if not _grant_next(board, slot):
            takers.remove(slot)


def _grant_next(board: Board, slot: Slot) -> bool:
    """False if nobody can be granted this model now. A suspect holds back those behind it until it can run alone."""
    worker = slot.worker
    while (waiter := board.line.first(slot.model)) is not None:
        verdict = board.suspects.verdict(slot.model, waiter.request_hash, board.now)
        if slot.state is not SlotState.READY or slot.stale or worker is None:
            return False
        if verdict is Verdict.POISON:
            board.reject(waiter, "poison", POISON_MESSAGE)
            continue
        if worker.alone or len(worker.leases) >= capacity(board, slot) or (verdict is Verdict.ALONE and worker.leases):
            return False
        board.grant(slot, waiter, alone=verdict is Verdict.ALONE)
        return True
    return False


def capacity(board: Board, slot: Slot) -> int:
    return slot.max_inflight + board.policy.max_queue


def too_large(board: Board, slot: Slot) -> str | None:
    """The refusal, if the model cannot fit beside the pinned ones even with everything else gone."""
    pinned_bytes = slot_shortage.pinned_bytes(board)
    budget_bytes, limit_bytes = board.policy.budget_bytes, board.policy.weights_limit_bytes
    if slot.need_bytes > budget_bytes - pinned_bytes:
        detail = board.policy.budget_detail
        return refusal(Shortfall(slot.model, slot.need_bytes, slot.cost.load_detail, budget_bytes, pinned_bytes, detail))
    pinned_weights_bytes = sum(other.cost.weights_bytes for other in board.slots.values() if other.holds_pinned)
    if limit_bytes is not None and slot.cost.weights_bytes > limit_bytes - pinned_weights_bytes:
        return weights_refusal(slot.model, slot.cost.weights_bytes, limit_bytes, pinned_weights_bytes)
    return None


def alarms(board: Board) -> Iterator[float]:
    """When waiting alone may change what can be loaded. Moments that have passed were acted upon."""
    head = _head(board)
    if head is not None:
        yield head[1] + board.timers.fair_wait_s
    if head is not None or board.ledger.free_bytes < 0:
        for slot in board.slots.values():
            if slot.state is SlotState.READY and not slot.pinned:
                yield slot.resident_since() + board.timers.min_resident_s
    yield from slot_shortage.alarms(board, head[0] if head is not None else None)
    if head is None:
        yield from slot_memory.alarms(board)


def _head(board: Board) -> tuple[Slot, float] | None:
    """The queued model with the oldest demand, and since when it is wanted."""
    queued: list[tuple[int, float, str]] = []
    for slot in board.slots.values():
        demand = board.demand(slot) if slot.state is SlotState.QUEUED else None
        if demand is not None:
            queued.append((*demand, slot.model))
    if not queued:
        return None
    _, since, model = min(queued)
    return board.slots[model], since


def _load_next(board: Board) -> None:
    if board.held:
        _turn_away(board)
        return
    if any(slot.loading for slot in board.slots.values()):
        return
    while (head := _head(board)) is not None:
        slot, since = head
        refused = too_large(board, slot)
        if refused is None:
            _load_or_make_room(board, slot, since)
            return
        board.end_demand(slot, "model_too_large", refused)
        board.enter(slot, SlotState.IDLE, "too large")


def _turn_away(board: Board) -> None:
    for slot in board.slots.values():
        if slot.state is SlotState.QUEUED:
            board.end_demand(slot, "shutting_down", board.held, HELD_RETRY_S)
            board.enter(slot, SlotState.IDLE, "restart needed")


def _load_or_make_room(board: Board, slot: Slot, since: float) -> None:
    if slot_shortage.hold(board, slot):
        return
    too_heavy_bytes = _weights_over_limit(board, slot)
    if too_heavy_bytes > 0:
        too_heavy_bytes -= _sum_in(board, SlotState.STOPPING, _weights_bytes)
        _make_room(board, slot, since, too_heavy_bytes, _weights_bytes)
        return
    missing_bytes = slot.need_bytes - board.ledger.free_bytes
    missing_bytes -= _charged_in(board, SlotState.STOPPING) + slot_memory.coming_back_bytes(board)
    spare_bytes = slot_memory.shrinkable_bytes(board)
    if missing_bytes <= spare_bytes:
        slot_memory.shrink_hot(board, missing_bytes)
    else:
        _make_room(board, slot, since, missing_bytes - spare_bytes, _firm_bytes)
    if slot.need_bytes <= board.ledger.free_bytes:
        slot_worker.spawn(board, slot)
        slot_shortage.forget_debt(board)


def _make_room(board: Board, slot: Slot, since: float, missing_bytes: int, size_of: SizeOf) -> None:
    """Idle models go if that is enough; after a while busy ones drain, too."""
    idle = _victims(board, idle=True, size_of=size_of)
    if missing_bytes <= 0 or _evict(board, slot, choose_victims(missing_bytes, idle)):
        return
    if board.now - since < board.timers.fair_wait_s:
        return
    missing_bytes -= _sum_in(board, SlotState.DRAINING, size_of)
    if missing_bytes > 0:
        busy = _victims(board, idle=False, size_of=size_of)
        _evict(board, slot, choose_victims(missing_bytes, [*idle, *busy]))


def _resume(board: Board) -> None:
    """A model that drains for one that nobody waits for any more serves again: stopping it would be a load for nothing."""
    head = _head(board)
    if head is not None and board.now - head[1] >= board.timers.fair_wait_s:
        return  # the next in line would make it drain again
    for slot in board.slots.values():
        worker = slot.worker
        if slot.state is not SlotState.DRAINING or worker is None or worker.drain_reason != FAIR or slot.stale or slot.removed:
            continue
        waiting = board.slots.get(worker.drain_for)
        if waiting is None or waiting.state is not SlotState.QUEUED:
            worker.drain_reason = worker.drain_for = ""
            board.enter(slot, SlotState.READY, "nobody waits for its memory any more")
            board.answer_loads(slot)
            grant_waiting(board)


def _repay_overdraft(board: Board) -> None:
    """Other programs, or a worker that measured above its charge, have put the sum over the budget, or a busy worker needs KV:
    hot caches pay for it, then idle models do."""
    over_bytes = slot_memory.wanted_bytes(board) - board.ledger.free_bytes
    over_bytes -= _charged_in(board, SlotState.STOPPING) + slot_memory.coming_back_bytes(board)
    if over_bytes > 0:
        over_bytes -= slot_memory.shrink_hot(board, over_bytes)
    if over_bytes > 0:
        idle = _victims(board, idle=True, size_of=_firm_bytes)
        _evict(board, None, choose_victims(over_bytes, idle) or _all_in_debt(board, idle))


def _all_in_debt(board: Board, idle: list[Victim]) -> tuple[str, ...]:
    """Over the budget every idle model helps; for a worker that only wants more none goes in vain."""
    owed_bytes = -board.ledger.free_bytes - _charged_in(board, SlotState.STOPPING) - slot_memory.coming_back_bytes(board)
    return tuple(victim.model for victim in idle) if owed_bytes > 0 else ()


SizeOf = Callable[[Board, Slot], int]


def _firm_bytes(board: Board, slot: Slot) -> int:
    """What ends with the worker alone: its hot cache can go before."""
    return board.ledger.charge_bytes(slot.model) - board.ledger.hot_bytes(slot.model)


def _weights_bytes(_: Board, slot: Slot) -> int:
    return slot.cost.weights_bytes


def _weights_over_limit(board: Board, slot: Slot) -> int:
    limit_bytes = board.policy.weights_limit_bytes
    return 0 if limit_bytes is None else slot_memory.weights_bytes(board) + slot.cost.weights_bytes - limit_bytes


def _charged_in(board: Board, state: SlotState) -> int:
    return _sum_in(board, state, lambda board, slot: board.ledger.charge_bytes(slot.model))


def _sum_in(board: Board, state: SlotState, size_of: SizeOf) -> int:
    return sum(size_of(board, slot) for slot in board.slots.values() if slot.state is state)


def _victims(board: Board, *, idle: bool, size_of: SizeOf) -> list[Victim]:
    """Idle models least recently used first, or busy ones longest resident first."""
    resident_by = board.now - board.timers.min_resident_s
    slots = [
        slot
        for slot in board.slots.values()
        if slot.state is SlotState.READY
        and _is_idle(board, slot) is idle
        and not slot.pinned
        and slot.resident_since() <= resident_by
    ]
    slots.sort(key=lambda slot: slot.last_used if idle else slot.resident_since())
    return [Victim(slot.model, size_of(board, slot)) for slot in slots]


def _is_idle(board: Board, slot: Slot) -> bool:
    """One that has no lease for want of a place among all is not."""
    return slot.idle and board.line.first(slot.model) is None


def _evict(board: Board, wanted: Slot | None, models: tuple[str, ...]) -> bool:
    """Idle ones stop; busy ones drain for `wanted`."""
    for model in models:
        slot = board.slots[model]
        assert slot.worker is not None
        if slot.worker.leases and wanted is not None:
            slot.worker.drain_for = wanted.model
            slot_worker.drain(board, slot, slot.worker, FAIR)
        else:
            slot_worker.stop(board, slot, slot.worker, "evicted")
    return bool(models)
