"""The slot state machine: which models run, who may use them, what happens when a worker dies.

`Machine.handle(event, now)` is the only way in and returns everything that is to be done. It reads no clock and touches
nothing: supervisor/shell.py turns the world into events, effects into the world, and sends a Tick when
`next_deadline()` has come.
"""

from __future__ import annotations

from collections.abc import Iterator

from supervisor import slot_loads, slot_memory, slot_oom, slot_shed, slot_shortage, slot_worker
from supervisor.pool import Waiter
from supervisor.slot_board import Board
from supervisor.slot_events import (
    Abandon,
    Acquire,
    ClientsServed,
    Effect,
    Event,
    GatewayLost,
    LoadRequested,
    MemoryRead,
    ModelCost,
    ModelsChanged,
    PinRequested,
    Release,
    ResetRequested,
    Shutdown,
    SlotEvent,
    SlotState,
    SpawnsHeld,
    Tick,
    UnloadRequested,
    WorkerBeat,
    WorkerEvent,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerMeasured,
    WorkerProgress,
    WorkerWants,
)
from supervisor.slot_poison import POISON_MESSAGE, Verdict
from supervisor.slot_record import Failure, LoadCall, Slot
from supervisor.slot_rules import Policy, Timers
from supervisor.slot_timers import gap_s, look_s, next_alarm
from supervisor.slot_view import BudgetView, SlotView

QUEUE_RETRY_S = 2.0  # a place in a full queue comes free with the next finished request
GONE = Failure("model_not_found", "the model is no longer in the catalog")
STOPS = Failure("shutting_down", "the server is shutting down")


class Machine:
    def __init__(self, timers: Timers, policy: Policy) -> None:
        self._board = Board(timers, policy)

    @property
    def policy(self) -> Policy:
        return self._board.policy

    @property
    def stopped(self) -> bool:
        return self._board.shutting_down and all(slot.worker is None for slot in self._board.slots.values())

    @property
    def demand(self) -> int:
        """Requests that run or wait."""
        return self._board.leases + len(self._board.line)

    @property
    def quiet(self) -> bool:
        """Nothing runs, waits or loads."""
        return self.demand == 0 and not any(slot.loading for slot in self._board.slots.values())

    def view(self) -> tuple[SlotView, ...]:
        return tuple(self._board.view(slot) for slot in self._board.slots.values())

    def at_work(self) -> list[tuple[str, int]]:
        """Model and generation of every worker that somebody holds a lease on."""
        slots = self._board.slots.values()
        return [(slot.model, slot.worker.gen) for slot in slots if slot.worker is not None and slot.worker.leases]

    def budget(self) -> BudgetView:
        return slot_memory.view(self._board)

    def next_deadline(self) -> float | None:
        """The earliest moment at which time alone changes something; always later than the last event."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        board = self._board
        for slot in board.slots.values():
            alarm = next_alarm(slot, board.timers)
            if alarm is not None:
                yield alarm[0]
        if any(slot.worker is not None for slot in board.slots.values()):
            yield board.now + look_s(board.timers)
        overdue = board.line.next_deadline()
        if overdue is not None:
            yield overdue
        yield from (at for at in slot_loads.alarms(board) if at > board.now)

    def handle(self, event: SlotEvent, now: float) -> list[Effect]:
        board = self._board
        board.effects = []
        passed_s, board.now = now - board.now, now
        self._excuse(passed_s)
        self._take(event)
        self._ring_alarms()
        slot_loads.advance(board)
        return board.effects

    def _excuse(self, passed_s: float) -> None:
        """After a sleep or a stop of this very process, whose own deafness must not look like the silence of its workers."""
        board = self._board
        if passed_s <= gap_s(board.timers):
            return
        live = [(slot, slot.worker) for slot in board.slots.values() if slot.worker is not None]
        for slot, worker in live:
            slot_worker.excuse(board, slot, worker, passed_s)
        if live:
            board.say(Event("gap", None, 0, {"seconds": passed_s}))

    def _take(self, event: SlotEvent) -> None:
        match event:
            case Acquire():
                self._acquire(event)
            case Abandon():
                self._abandon(event.rid)
            case Release():
                self._board.release(event.lease, event.ok)
            case GatewayLost():
                self._gateway_lost(event.gateway)
            case ClientsServed():
                self._serve(event.gateway, event.models)
            case ModelsChanged():
                self._models_changed(event.models)
            case LoadRequested():
                self._load(event)
            case UnloadRequested():
                self._unload(event)
            case PinRequested():
                self._pin(event)
            case ResetRequested():
                self._reset(event)
            case MemoryRead():
                slot_memory.read(self._board, event)
            case Tick():
                pass
            case SpawnsHeld():
                self._hold(event)
            case Shutdown():
                self._shut_down()
            case _:
                self._worker_event(event)

    def _worker_event(self, event: WorkerEvent) -> None:
        """What another incarnation says, or said before it was replaced, is ignored."""
        board = self._board
        slot = board.slots.get(event.model)
        if slot is None or slot.worker is None or slot.worker.gen != event.gen:
            return
        worker = slot.worker
        match event:
            case WorkerHello():
                slot_worker.hello(board, slot, worker)
            case WorkerProgress():
                slot_worker.progress(board, slot, worker, event)
            case WorkerBeat():
                slot_worker.beat(board, slot, worker, event)
                slot_memory.settle_hot(board, slot, worker)
            case WorkerMeasured():
                slot_worker.measured(board, slot, worker, event)
            case WorkerWants():
                slot_memory.want(board, slot, worker, event)
            case WorkerFault():
                slot_worker.fault(board, slot, worker, event)
            case WorkerExited():
                slot_shortage.expect_back(board, slot)
                slot_worker.exited(board, slot, worker, event)
            case _:
                slot_worker.ready(board, slot, worker, event)

    def _ring_alarms(self) -> None:
        board = self._board
        slot_shortage.ring_debt(board)
        for waiter in board.line.overdue(board.now):
            board.reject(waiter, "deadline", f"no worker for {waiter.model} before the request's deadline")
        for slot in tuple(board.slots.values()):
            while (alarm := next_alarm(slot, board.timers)) is not None and alarm[0] <= board.now:
                slot_worker.ring(board, slot, alarm[1])

    # Requests

    def _acquire(self, event: Acquire) -> None:
        board = self._board
        if event.rid in board.line or board.lease_of(event.rid) is not None:
            return  # sent twice: the first is answered, or will be
        slot = board.slots.get(event.model)
        waiter = Waiter(
            event.rid,
            event.gateway,
            event.model,
            event.deadline_at,
            event.request_hash,
            board.next_seq(),
            board.now,
            event.profile,
        )
        if board.shutting_down:
            board.reject(waiter, STOPS.code, STOPS.message)
        elif slot is None or slot.removed:
            board.reject(waiter, "model_not_found", f"there is no model {event.model}")
        elif not self._refused(slot, waiter):
            board.line.add(waiter)
            if not self._want(slot) and waiter.rid in board.line:
                board.tell_newest(slot)

    def _refused(self, slot: Slot, waiter: Waiter) -> bool:
        """Rejects what need not wait to be rejected."""
        board = self._board
        if waiter.deadline_at is not None and waiter.deadline_at <= board.now:
            board.reject(waiter, "deadline", "the request's deadline has passed")
        elif board.suspects.verdict(slot.model, waiter.request_hash, board.now) is Verdict.POISON:
            board.reject(waiter, "poison", POISON_MESSAGE)
        elif (failure := self._failure(slot)) is not None:
            board.reject(waiter, failure.code, failure.message, slot_worker.retry_after_s(board, slot))
        elif slot.worker is None and (refused := slot_loads.too_large(board, slot)) is not None:
            board.reject(waiter, "model_too_large", refused)
        elif self._taken(slot) >= slot_loads.capacity(board, slot):
            board.reject(waiter, "queue_full", f"{slot.model} has {self._taken(slot)} requests already", QUEUE_RETRY_S)
        elif board.is_full:
            taken = board.leases + len(board.line)
            board.reject(waiter, "queue_full", f"the server has {taken} requests already", QUEUE_RETRY_S)
        else:
            return False
        return True

    def _taken(self, slot: Slot) -> int:
        return self._board.line.length(slot.model) + (len(slot.worker.leases) if slot.worker else 0)

    def _failure(self, slot: Slot) -> Failure | None:
        """Why a failed model is not tried, until its next probe is due."""
        due = slot.probe_at is not None and slot.probe_at <= self._board.now
        return slot.failed if slot.state is SlotState.FAILED and not due else None

    def _want(self, slot: Slot) -> bool:
        """Somebody new waits for this model; true if that is what queued it."""
        board = self._board
        if slot.state is SlotState.READY and slot.worker is not None and not slot.stale:
            slot_loads.grant_waiting(board)
        if slot.state in (SlotState.IDLE, SlotState.FAILED):
            slot.probing = slot.probing or slot.state is SlotState.FAILED
            board.enter(slot, SlotState.QUEUED, "wanted")
            return True
        return False

    def _abandon(self, rid: str) -> None:
        board = self._board
        board.line.remove(rid)
        lease = board.lease_of(rid)
        if lease is not None:
            board.release(lease, ok=False)

    def _gateway_lost(self, gateway: str) -> None:
        board = self._board
        for waiter in board.line.of_gateway(gateway):
            board.line.remove(waiter.rid)
        for slot in board.slots.values():
            for lease in tuple(slot.worker.leases.values()) if slot.worker else ():
                if lease.gateway == gateway:
                    board.release(lease.lease, ok=False)
        self._serve(gateway, frozenset())

    def _serve(self, gateway: str, models: frozenset[str]) -> None:
        """A model is in use until its clients have been sent everything, which may be long after its worker was done."""
        for slot in self._board.slots.values():
            if slot.model in models:
                slot.serving.add(gateway)
            elif gateway in slot.serving:
                slot.serving.remove(gateway)
                slot.last_used = self._board.now

    def _hold(self, event: SpawnsHeld) -> None:
        board = self._board
        board.held = event.reason
        slot = board.slots.get(event.model) if event.model is not None else None
        if slot is not None and slot.worker is not None and slot.worker.gen == event.gen and slot.loading:
            slot_worker.stop(board, slot, slot.worker, "another build")

    # Calls

    def _known(self, model: str, call: str | None) -> Slot | None:
        board = self._board
        slot = board.slots.get(model)
        if board.shutting_down:
            board.answer(call, False, STOPS.code, STOPS.message)
        elif slot is None or slot.removed:
            board.answer(call, False, "model_not_found", f"there is no model {model}")
        else:
            return slot
        return None

    def _load(self, event: LoadRequested) -> None:
        board = self._board
        slot = self._known(event.model, event.call)
        if slot is None:
            return
        failure = self._failure(slot)
        if failure is None and slot.worker is None and (refused := slot_loads.too_large(board, slot)) is not None:
            failure = Failure("model_too_large", refused)
        if failure is not None:
            board.answer(event.call, False, failure.code, failure.message)
            return
        if event.pin:
            slot.pinned_by_call = True
            board.say_pinned(slot)
        slot.last_used = board.now
        slot.load_calls.append(LoadCall(event.call, board.next_seq(), board.now))
        self._want(slot)

    def _unload(self, event: UnloadRequested) -> None:
        """Ends what runs or waits now; a request that comes during the unload waits for a new worker."""
        board = self._board
        slot = self._known(event.model, event.call)
        if slot is None:
            return
        if slot.pinned_by_call:
            slot.pinned_by_call = None
        board.end_demand(slot, "model_unloaded", f"{slot.model} was unloaded")
        if event.call is not None:
            slot.unload_calls.append(event.call)
        worker = slot.worker
        if worker is None:
            board.answer_unloads(slot)
            if slot.state in (SlotState.QUEUED, SlotState.BACKOFF):
                slot.backoff_until = None
                board.enter(slot, SlotState.IDLE, "unload")
        elif slot.loading:
            slot_worker.stop(board, slot, worker, "unload")
        elif slot.state in (SlotState.READY, SlotState.DRAINING):
            until = board.now if event.force else board.now + board.timers.unload_drain_s
            slot_worker.drain(board, slot, worker, "unload", until)

    def _pin(self, event: PinRequested) -> None:
        slot = self._known(event.model, event.call)
        if slot is not None:
            slot.pinned_by_call = event.pinned
            self._board.say_pinned(slot)
            self._board.answer(event.call, True, "", f"{slot.model} is {'pinned' if event.pinned else 'not pinned'}")

    def _reset(self, event: ResetRequested) -> None:
        slot = self._known(event.model, event.call)
        if slot is not None:
            slot_memory.forget_peak(self._board, slot)
            self._forgive(slot, "reset")
            slot_oom.forget(self._board, slot)  # also of what it is loaded with again
            self._board.answer(event.call, True, "", f"{slot.model} is reset")

    def _forgive(self, slot: Slot, reason: str) -> None:
        board = self._board
        slot.forget_crashes()
        slot_shed.restore(board, slot)
        board.suspects.forget(slot.model)
        if slot.state in (SlotState.BACKOFF, SlotState.FAILED):
            board.enter(slot, SlotState.IDLE if board.demand(slot) is None else SlotState.QUEUED, reason)

    # The catalog, and the end

    def _models_changed(self, models: tuple[ModelCost, ...]) -> None:
        board = self._board
        listed = {cost.model: cost for cost in models}
        for slot in tuple(board.slots.values()):
            if slot.model not in listed:
                self._remove(slot)
        for cost in models:
            slot = board.slots.get(cost.model)
            if slot is None:
                gen = board.gens.get(cost.model, 0)
                slot = board.slots[cost.model] = Slot(cost, gen=gen, measured_bytes=cost.known_bytes)
                board.enter(slot, SlotState.IDLE, "listed")
                slot_shed.known(board, slot)
                continue
            slot.removed = False
            if slot_shed.changed(slot, cost):
                self._forgive(slot, "load settings changed")
            elif slot.failed is not None and slot.failed.code == "model_unloadable":
                slot.probe_at = board.now  # what was missing may be back as it was: a disk, a file

    def _remove(self, slot: Slot) -> None:
        board = self._board
        board.end_demand(slot, GONE.code, GONE.message)
        slot.removed = True
        if slot.worker is None:
            board.enter(slot, SlotState.IDLE, "removed")
            del board.slots[slot.model]

    def _shut_down(self) -> None:
        board = self._board
        board.shutting_down = True
        for slot in board.slots.values():
            board.end_demand(slot, STOPS.code, STOPS.message)
            slot.backoff_until = None
            worker = slot.worker
            if worker is None:
                if slot.state is not SlotState.IDLE:
                    board.enter(slot, SlotState.IDLE, "shutdown")
            elif slot.state is not SlotState.STOPPING:
                board.lose_leases(slot, STOPS.code, STOPS.message)
                slot_worker.stop(board, slot, worker, "shutdown")
