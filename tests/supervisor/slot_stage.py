"""A stage for the slot machine: a clock that moves only when told to, and the events a test would otherwise spell out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from supervisor.slot import Machine
from supervisor.slot_events import (
    Acquire,
    Effect,
    Granted,
    ModelCost,
    ModelsChanged,
    Release,
    SlotEvent,
    SlotState,
    Tick,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerReady,
)
from supervisor.slot_rules import Policy, Timers
from supervisor.slot_view import SlotView

T = TypeVar("T")


class Stage:
    def __init__(
        self,
        costs: Iterable[ModelCost],
        *,
        budget_bytes: int = 10,
        timers: Timers | None = None,
        max_queue: int = 4,
        max_total: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.now = 1000.0
        self.timers = timers or Timers()
        self.machine = Machine(self.timers, policy or Policy(budget_bytes, max_queue, max_total))
        self.all: list[Effect] = []
        self.beating: set[str] = set()
        self.hot: dict[str, int] = {}  # what their hot caches hold
        self.do(ModelsChanged(tuple(costs)))

    def do(self, event: SlotEvent) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.all.extend(effects)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Time passes, with a Tick at every deadline and a healthy beat of each model in `beating` every second."""
        start, end = len(self.all), self.now + seconds
        next_beat = self.now + 1
        while True:
            deadline = self.machine.next_deadline()
            until = min(end, next_beat, deadline if deadline is not None else end)
            assert until >= self.now
            self.now = until
            self.do(Tick())
            if self.now >= next_beat:
                next_beat += 1
                for model in self.beating:
                    self.do(WorkerBeat(model, self.slot(model).gen, int(self.now), 1, self.hot.get(model, 0)))
            if self.now >= end:
                return self.all[start:]

    def acquire(
        self, rid: str, model: str, *, request_hash: str = "", deadline_at: float | None = None, gateway: str = "g.1"
    ) -> list[Effect]:
        return self.do(Acquire(rid, gateway, model, 0, deadline_at, request_hash))

    def release(self, rid: str, ok: bool = True) -> list[Effect]:
        return self.do(Release(self.lease(rid), ok))

    def come_up(self, model: str, *, measured_bytes: int = 0, max_inflight: int = 2) -> list[Effect]:
        gen = self.slot(model).gen
        hello = self.do(WorkerHello(model, gen))
        self.beating.add(model)
        return hello + self.do(WorkerReady(model, gen, measured_bytes, max_inflight))

    def exit(
        self, model: str, *, code: int | None = None, signal: int | None = None, tail: str = "", oom_killed: bool = False
    ) -> list[Effect]:
        self.beating.discard(model)
        return self.do(WorkerExited(model, self.slot(model).gen, code, signal, tail, oom_killed))

    def slot(self, model: str) -> SlotView:
        return next(view for view in self.machine.view() if view.model == model)

    def state(self, model: str) -> SlotState:
        return self.slot(model).state

    def lease(self, rid: str) -> str:
        return next(effect.lease for effect in reversed(self.all) if isinstance(effect, Granted) and effect.rid == rid)

    def ready_model(self, model: str, *, max_inflight: int = 2) -> None:
        """Bring a model up by a request that is released again, and let its protected time pass."""
        self.acquire(f"up-{model}", model)
        self.come_up(model, max_inflight=max_inflight)
        self.release(f"up-{model}")
        self.wait(self.timers.min_resident_s)


def only(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(effects: Iterable[Effect], kind: type[T]) -> T:
    (found,) = only(effects, kind)
    return found
