"""The state the machine's parts share, and the few moves all of them make: say, transition, reject, lose, answer.

Holds no rule about when to make them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.pool import Ledger, Line, Waiter
from supervisor.slot_events import CallDone, Effect, Event, Granted, Lost, MemoryRead, QueuedAt, Rejected, SlotState
from supervisor.slot_poison import POISON_MESSAGE, Suspects, Verdict
from supervisor.slot_record import Failure, Lease, Slot
from supervisor.slot_rules import Policy, Timers
from supervisor.slot_view import SlotView

UNTOLD = (SlotState.IDLE, SlotState.READY, SlotState.FAILED)  # states nobody goes on waiting in


@dataclass(slots=True)
class Debt:
    """Memory of workers that are gone, until it is seen to be back."""

    outside_bytes: int  # what was held outside the process tree while the first of them still lived
    until: float
    expected_bytes: int = 0
    models: list[str] = field(default_factory=list[str])
    overdue: bool = False


class Board:
    def __init__(self, timers: Timers, policy: Policy) -> None:
        self.timers = timers
        self.policy = policy
        self.now = 0.0
        self.slots: dict[str, Slot] = {}
        self.gens: dict[str, int] = {}  # outlives a slot: a model that comes back must not reuse an identity
        self.line = Line()
        self.ledger = Ledger(policy.budget_bytes)
        self.memory: MemoryRead | None = None
        self.debt: Debt | None = None
        self.trimmed_at = float("-inf")
        self.hot_rests_until = float("-inf")
        self.suspects = Suspects(keep_s=timers.probe_after_s)
        self._lease_model: dict[str, str] = {}
        self._rid_lease: dict[str, str] = {}
        self.shutting_down = False
        self.held = ""
        """Why nothing is spawned any more."""
        self.effects: list[Effect] = []
        self._seq = 0

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def say(self, effect: Effect) -> None:
        self.effects.append(effect)

    def enter(self, slot: Slot, state: SlotState, reason: str = "") -> None:
        previous, slot.state, slot.since = slot.state, state, self.now
        data = {"state": state.value, "previous": previous.value, "reason": reason}
        if slot.last_error and state in (SlotState.BACKOFF, SlotState.FAILED):
            data["error"] = slot.last_error
        self.say(Event("slot", slot.model, slot.gen, data))
        self.tell_waiters(slot)

    def say_pinned(self, slot: Slot) -> None:
        state = slot.state.value
        data = {"state": state, "previous": state, "reason": "pinned" if slot.pinned else "unpinned"}
        self.say(Event("slot", slot.model, slot.gen, data))

    def tell_waiters(self, slot: Slot) -> None:
        if slot.state in UNTOLD:
            return
        for position, waiter in enumerate(self.line.of_model(slot.model), start=1):
            self.say(QueuedAt(waiter.rid, waiter.gateway, position, slot.state))

    def tell_newest(self, slot: Slot) -> None:
        waiters = self.line.of_model(slot.model)
        self.say(QueuedAt(waiters[-1].rid, waiters[-1].gateway, len(waiters), slot.state))

    # Demand

    def demand(self, slot: Slot) -> tuple[int, float] | None:
        """(order of arrival, when) of the oldest request or call that waits for this model."""
        first = self.line.first(slot.model)
        demands = [(call.seq, call.since) for call in slot.load_calls]
        if first is not None:
            demands.append((first.seq, first.since))
        return min(demands, default=None)

    def reject(self, waiter: Waiter, code: str, message: str, retry_after_s: float | None = None) -> None:
        self.line.remove(waiter.rid)
        self.say(Rejected(waiter.rid, waiter.gateway, code, message, retry_after_s))

    def end_demand(self, slot: Slot, code: str, message: str, retry_after_s: float | None = None) -> None:
        """Everyone who waits for this model is told that it will not come."""
        for waiter in self.line.of_model(slot.model):
            self.reject(waiter, code, message, retry_after_s)
        self.answer_loads(slot, Failure(code, message))

    # Leases

    @property
    def leases(self) -> int:
        return len(self._lease_model)

    @property
    def has_place(self) -> bool:
        """For one more lease, as far as all models together are concerned."""
        return self.policy.max_total is None or self.leases < self.policy.max_total

    @property
    def is_full(self) -> bool:
        """Those that have a lease and those that wait are as many as all models together may have."""
        limit, taken = self.policy.max_total, self.leases + len(self.line)
        return limit is not None and taken >= limit + self.policy.max_queue

    def grant(self, slot: Slot, waiter: Waiter, alone: bool) -> None:
        worker = slot.worker
        assert worker is not None
        self.line.remove(waiter.rid)
        slot.granted_seq = self.next_seq()
        lease = Lease(f"l{slot.granted_seq}", waiter.rid, waiter.gateway, waiter.request_hash, alone)
        worker.leases[lease.lease] = lease
        self._lease_model[lease.lease] = slot.model
        self._rid_lease[lease.rid] = lease.lease
        slot.last_used = self.now
        self.say(Granted(lease.rid, lease.gateway, lease.lease, slot.model, worker.gen, waiter.profile))

    def lease_of(self, rid: str) -> str | None:
        return self._rid_lease.get(rid)

    def release(self, lease_id: str, ok: bool) -> None:
        """A lease that is unknown was lost or released before: its holder could not know."""
        model = self._lease_model.pop(lease_id, None)
        if model is None:
            return
        slot = self.slots[model]
        assert slot.worker is not None
        lease = slot.worker.leases.pop(lease_id)
        del self._rid_lease[lease.rid]
        slot.last_used = self.now
        if ok and self.suspects.verdict(model, lease.request_hash, self.now) is Verdict.ALONE:
            self.suspects.survived(model, lease.request_hash)

    def lose_leases(self, slot: Slot, code: str, message: str) -> None:
        assert slot.worker is not None
        for lease in slot.worker.leases.values():
            del self._lease_model[lease.lease]
            del self._rid_lease[lease.rid]
            verdict = self.suspects.verdict(slot.model, lease.request_hash, self.now)
            if verdict is Verdict.POISON:  # it has just died alone
                self.say(Lost(lease.lease, lease.gateway, lease.rid, "poison", POISON_MESSAGE))
            else:
                self.say(Lost(lease.lease, lease.gateway, lease.rid, code, message))
        slot.worker.leases.clear()

    # Calls

    def answer(self, call: str | None, ok: bool, code: str, message: str) -> None:
        if call is not None:
            self.say(CallDone(call, ok, code, message))

    def answer_loads(self, slot: Slot, failure: Failure | None = None) -> None:
        calls, slot.load_calls = slot.load_calls, []
        for call in calls:
            if failure is None:
                self.answer(call.call, True, "", f"{slot.model} is ready")
            else:
                self.answer(call.call, False, failure.code, failure.message)

    def answer_unloads(self, slot: Slot) -> None:
        calls, slot.unload_calls = slot.unload_calls, []
        for call in calls:
            self.answer(call, True, "", f"{slot.model} is unloaded")

    def view(self, slot: Slot) -> SlotView:
        worker = slot.worker
        measured_bytes = worker.measured_bytes if worker else 0
        return SlotView(
            model=slot.model,
            state=slot.state,
            gen=slot.gen,
            leases=len(worker.leases) if worker else 0,
            waiting=self.line.length(slot.model),
            stage=worker.stage if worker else "",
            done=worker.done if worker else 0,
            total=worker.total if worker else 0,
            charged_bytes=self.ledger.charge_bytes(slot.model),
            measured_bytes=measured_bytes,
            past_peak_bytes=self.ledger.past_peak_bytes(slot.model, measured_bytes) if measured_bytes else 0,
            kv_granted_bytes=worker.kv_bytes if worker else 0,
            hot_granted_bytes=worker.hot_bytes if worker else 0,
            since=slot.since,
            last_used=slot.last_used,
            last_error=slot.last_error,
            restarts=slot.restarts,
            backoff_until=slot.backoff_until,
            pinned=slot.pinned,
            max_inflight=slot.max_inflight,
            shed=slot.shed,
        )
