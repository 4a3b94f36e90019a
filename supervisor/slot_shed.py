"""Optional features that a model is started without after two deaths with them: a draft model, quantized KV.

All of a model's features are one set: which of them it died of nobody can tell. They stay off until the model is reset or
loads otherwise by its settings, also through a restart of the server, and the slot's cost is that of a load without them
meanwhile.
"""

from __future__ import annotations

from supervisor.slot_board import Board
from supervisor.slot_events import Event, ModelCost, RememberShed
from supervisor.slot_record import Slot, Worker

DEATHS = 2


def died(board: Board, slot: Slot, worker: Worker) -> None:
    """Call after a crash, once the slot says what went wrong."""
    bare = slot.cost.without
    if bare is None or worker.load_key != slot.cost.load_key:
        return
    slot.feature_deaths = [at for at in slot.feature_deaths if board.now - at < board.timers.crash_window_s] + [board.now]
    if len(slot.feature_deaths) < DEATHS:
        return
    board.say(RememberShed(slot.model, slot.cost.load_key, True))
    _shed(board, slot, bare)


def known(board: Board, slot: Slot) -> None:
    """Call with a slot that is new: what an earlier server found out holds for this one."""
    if slot.cost.known_shed and slot.cost.without is not None:
        _shed(board, slot, slot.cost.without)


def _shed(board: Board, slot: Slot, bare: ModelCost) -> None:
    features = " and ".join(slot.cost.features)
    slot.shed_from, slot.cost = slot.cost, bare
    slot.measured_bytes = bare.known_bytes
    message = f"{slot.model} died {DEATHS} times with {features} and is started without until: omlxctl reset {slot.model}"
    slot.last_error = f"{message}\n{slot.last_error}".strip()
    board.say(Event("shed", slot.model, slot.gen, {"features": list(slot.shed), "message": message}))


def restore(board: Board, slot: Slot) -> None:
    """The features are tried again: with the next worker, as the present one is stale now."""
    slot.feature_deaths.clear()
    if slot.shed_from is not None:
        take_cost(slot, slot.shed_from)
    board.say(RememberShed(slot.model, slot.cost.load_key, False))


def take_cost(slot: Slot, cost: ModelCost) -> None:
    """What a load costs with all features."""
    slot.cost, slot.shed_from = cost, None
    slot.measured_bytes = cost.known_bytes


def changed(slot: Slot, cost: ModelCost) -> bool:
    """The catalog's cost is new. Whether it is that of another load; if not, what was shed stays so."""
    before = slot.shed_from or slot.cost
    if before.load_key != cost.load_key:
        take_cost(slot, cost)
        return True
    if slot.shed_from is not None and cost.without is not None:
        slot.shed_from, slot.cost = cost, cost.without
    else:
        slot.cost = cost
    return False
