"""What the supervisor remembers of one model (Slot) and of its one live process (Worker).

Data and questions about it. A slot has a worker exactly while a process lives; every change is made by the machine's parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from supervisor.slot_events import ModelCost, SlotState

LIVE_PINS = (SlotState.SPAWNING, SlotState.LOADING, SlotState.READY)


@dataclass(frozen=True, slots=True)
class Lease:
    lease: str
    rid: str
    gateway: str
    request_hash: str
    alone: bool  # under suspicion: runs with no other lease on the worker


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    message: str


class StopStep(StrEnum):
    ASKED = "asked"
    TERMINATED = "terminated"
    KILLED = "killed"


@dataclass(slots=True)
class Worker:
    """One incarnation, from spawn to exit."""

    gen: int
    load_key: str
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    max_inflight: int = 0
    measured_bytes: int = 0  # by a meter, last
    peak_bytes: int = 0  # by a meter, the most
    ready_at: float | None = None

    stage: str = ""
    done: int = 0
    total: int = 0
    progress_at: float = 0.0  # the load last got further

    beat_at: float = 0.0
    counter: int = -1
    counter_at: float = 0.0  # the engine last got further, or had nothing to do
    queued: int = 0
    kv_bytes: int = 0  # what it may use for KV
    wants_kv_bytes: int = 0  # and what it asked for
    wanted_at: float = 0.0
    owed_answer: bool = False  # what it may use is still to be said, once it is known what makes room for it
    hot_bytes: int = 0  # granted for the RAM tier of its prefix cache
    hot_held_bytes: int = 0  # in it, as it said last
    dumped_at: float | None = None

    drain_reason: str = ""
    drain_for: str = ""  # the model that waits for the memory, of a drain for fairness
    drain_until: float | None = None  # None: what runs may finish
    stop_step: StopStep | None = None
    stop_at: float | None = None  # when the next step of the escalation is due

    fault: Failure | None = None  # what the worker said of its own end
    failure: Failure | None = None  # why the machine gave it up: its exit is a crash although it was stopped

    @property
    def alone(self) -> bool:
        return any(lease.alone for lease in self.leases.values())


@dataclass(frozen=True, slots=True)
class LoadCall:
    """A load somebody asked for by name, with or without waiting for the outcome."""

    call: str | None
    seq: int
    since: float


@dataclass(slots=True)
class Slot:
    cost: ModelCost
    state: SlotState = SlotState.IDLE
    since: float = 0.0
    worker: Worker | None = None
    gen: int = 0
    removed: bool = False  # gone from the catalog: disappears with its worker
    pinned_by_call: bool | None = None  # None: as the settings say
    load_calls: list[LoadCall] = field(default_factory=list[LoadCall])
    unload_calls: list[str] = field(default_factory=list[str])
    last_used: float = 0.0
    serving: set[str] = field(default_factory=set[str])  # gateways that have clients of this model, with a lease or without
    granted_seq: int = 0  # when it was last granted a lease, in the order of arrivals and grants
    measured_bytes: int = 0  # the most a worker of this load key proved to need
    oom_deaths: list[float] = field(default_factory=list[float])
    held_at: float | None = None  # since when its load waits for memory that other programs have
    max_inflight: int = 1  # as the last worker said

    crashes: list[float] = field(default_factory=list[float])
    streak: int = 0  # crashes in a row, no two further apart than the window: sets the back-off
    restarts: int = 0
    last_error: str = ""
    backoff_until: float | None = None
    failed: Failure | None = None
    probe_at: float | None = None
    probing: bool = False

    feature_deaths: list[float] = field(default_factory=list[float])
    shed_from: ModelCost | None = None  # the cost with the features that it is started without now

    @property
    def shed(self) -> tuple[str, ...]:
        return () if self.shed_from is None else self.shed_from.features

    @property
    def model(self) -> str:
        return self.cost.model

    @property
    def need_bytes(self) -> int:
        return max(self.cost.load_bytes, self.measured_bytes)

    @property
    def pinned(self) -> bool:
        return self.cost.pinned if self.pinned_by_call is None else self.pinned_by_call

    @property
    def holds_pinned(self) -> bool:
        return self.pinned and self.state in LIVE_PINS

    @property
    def loading(self) -> bool:
        return self.state in (SlotState.SPAWNING, SlotState.LOADING)

    @property
    def stale(self) -> bool:
        return self.worker is not None and self.worker.load_key != self.cost.load_key

    @property
    def idle(self) -> bool:
        return self.state is SlotState.READY and self.worker is not None and not self.worker.leases

    def resident_since(self) -> float:
        """When the live worker became ready; in the far past for want of one."""
        ready_at = self.worker.ready_at if self.worker is not None else None
        return ready_at if ready_at is not None else float("-inf")

    def forget_crashes(self) -> None:
        self.crashes.clear()
        self.oom_deaths.clear()
        self.streak = 0
        self.backoff_until = None
        self.failed = None
        self.probe_at = None
        self.probing = False
        self.last_error = ""
