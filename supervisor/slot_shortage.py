"""Memory that is not ours to give: of workers that have just gone, until it is seen to be back, and what other programs hold.

A load waits for the first a while and then does without what is missing; it waits for the second a while and then is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.budget import Shortfall, gib, refusal
from supervisor.pressure import Level
from supervisor.slot_board import Board, Debt
from supervisor.slot_events import Event, MemoryRead, ReadMemory, SlotState
from supervisor.slot_record import Slot

NOISE_SHARE = 10
DEBT_KEPT_S = 60.0  # memory that is not back by then is somebody else's, and the budget knows of it
RETRY_S = 10.0


def expect_back(board: Board, slot: Slot) -> None:
    """Its worker has exited: what it held is not free before it is seen to be."""
    held_bytes = board.memory.workers.get(slot.model, 0) if board.memory else 0
    if board.memory is None or held_bytes <= 0:
        return
    if board.debt is None:
        board.debt = Debt(board.memory.outside_bytes, board.now + board.timers.memory_back_s)
    board.debt.models.append(slot.model)
    board.debt.expected_bytes += held_bytes
    board.debt.until, board.debt.overdue = board.now + board.timers.memory_back_s, False
    board.ledger.missing_bytes = board.debt.expected_bytes
    board.say(ReadMemory())


def look_for_missing(board: Board, event: MemoryRead) -> None:
    debt = board.debt
    if debt is None:
        return
    missing_bytes = min(debt.expected_bytes, max(0, event.outside_bytes - debt.outside_bytes))
    if missing_bytes <= max(board.policy.noise_bytes, debt.expected_bytes // NOISE_SHARE):
        forget_debt(board)
        return
    board.ledger.missing_bytes = missing_bytes
    if not debt.overdue:
        board.say(ReadMemory())


def forget_debt(board: Board) -> None:
    board.debt = None
    board.ledger.missing_bytes = 0


def ring_debt(board: Board) -> None:
    """So long and no longer: the next load does without what is missing."""
    debt = board.debt
    if debt is None:
        return
    if not debt.overdue and debt.until <= board.now:
        debt.overdue = True
        data = {"missing_bytes": board.ledger.missing_bytes, "of": list(debt.models), "after_s": board.timers.memory_back_s}
        board.say(Event("memory", None, 0, data))
    if debt.until + DEBT_KEPT_S <= board.now:
        forget_debt(board)


def pinned_bytes(board: Board) -> int:
    """Held by models that are never evicted; their hot caches can be shrunk."""
    pinned = [slot.model for slot in board.slots.values() if slot.holds_pinned]
    return sum(board.ledger.charge_bytes(model) - board.ledger.hot_bytes(model) for model in pinned)


def why_held(board: Board, slot: Slot) -> str:
    """Why this load cannot start now although it fits the budget by itself; empty if it can, or can once models have gone."""
    if board.memory is not None and board.memory.level >= Level.HARD:
        return f"no model is loaded while memory is short: {board.memory.because}"
    held_bytes = pinned_bytes(board)
    lost_bytes = board.ledger.missing_bytes if board.debt is not None and board.debt.overdue else 0
    budget_bytes = board.ledger.budget_bytes - lost_bytes
    if slot.need_bytes <= budget_bytes - held_bytes:
        return ""
    why = board.memory.budget_because if board.memory else ""
    if lost_bytes:
        why += f"{'; ' if why else ''}{gib(lost_bytes)} of an unloaded model are not back"
    detail = f"now, {why}" if why else "now"
    return refusal(Shortfall(slot.model, slot.need_bytes, slot.cost.load_detail, budget_bytes, held_bytes, detail))


def hold(board: Board, slot: Slot) -> bool:
    """True while a load has to wait for memory that it is not ours to free; a while later whoever waits is told so."""
    why = why_held(board, slot)
    if not why:
        slot.held_at = None
        return False
    if slot.held_at is None or slot.held_at < slot.since:
        slot.held_at = board.now
    if board.now - slot.held_at >= board.timers.memory_wait_s:
        board.end_demand(slot, "busy", why, RETRY_S)
        board.enter(slot, SlotState.IDLE, "no memory")
        slot.held_at = None
    return True


def alarms(board: Board, head: Slot | None) -> Iterator[float]:
    if board.debt is not None:
        yield board.debt.until + (DEBT_KEPT_S if board.debt.overdue else 0)
    if head is not None and head.held_at is not None:
        yield head.held_at + board.timers.memory_wait_s
