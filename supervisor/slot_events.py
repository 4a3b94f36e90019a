"""The contract between the slot machine and its shell: what can happen, what is to be done about it, what can be seen.

Plain values only. The shell turns sockets, exits and clocks into events and effects into messages, processes and signals;
nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class SlotState(StrEnum):
    IDLE = "idle"
    QUEUED = "queued"
    SPAWNING = "spawning"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Timers:
    hello_s: float = 20
    load_stall_s: float = 120
    beat_lost_s: float = 30
    no_progress_s: float = 180
    stop_s: float = 10
    term_s: float = 3
    unload_drain_s: float = 30
    fair_wait_s: float = 20
    min_resident_s: float = 10
    crash_window_s: float = 300
    crash_limit: int = 3
    probe_after_s: float = 600
    backoff_first_s: float = 1
    backoff_max_s: float = 60


@dataclass(frozen=True, slots=True)
class Policy:
    budget_bytes: int
    max_queue: int = 64  # leases a model may have beyond what its worker runs at once
    max_total: int | None = None  # leases of all models together; as many as `max_queue` requests may wait for one beyond them


# Events


@dataclass(frozen=True, slots=True)
class ModelCost:
    model: str
    load_bytes: int
    pinned: bool = False
    ttl_s: float | None = None  # unloaded after so long without a lease; None = never
    load_key: str = ""  # a worker loaded under another key is stale
    load_detail: str = ""  # how load_bytes came about, shown when a load is refused


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The whole catalog as it is now: a model that is not in it drains and disappears."""

    models: tuple[ModelCost, ...]


@dataclass(frozen=True, slots=True)
class Acquire:
    """A gateway wants a lease. Grants are in order of arrival: by priority only the worker orders."""

    rid: str
    gateway: str
    model: str
    priority: int
    deadline_at: float | None
    request_hash: str  # "" is never suspected of anything
    profile: str | None = None  # returned with the grant


@dataclass(frozen=True, slots=True)
class Abandon:
    """The requester is gone. Also releases a lease that was granted meanwhile."""

    rid: str


@dataclass(frozen=True, slots=True)
class Release:
    lease: str
    ok: bool


@dataclass(frozen=True, slots=True)
class LoadRequested:
    model: str
    call: str | None
    pin: bool = False


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    model: str
    call: str | None
    force: bool


@dataclass(frozen=True, slots=True)
class PinRequested:
    """For the life of the server, whatever the settings say."""

    model: str
    call: str | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class ResetRequested:
    """Forget crashes, back-off and condemned requests of a model."""

    model: str
    call: str | None


@dataclass(frozen=True, slots=True)
class WorkerHello:
    model: str
    gen: int


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    model: str
    gen: int
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    model: str
    gen: int
    measured_bytes: int
    max_inflight: int


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    model: str
    gen: int
    progress: int  # prefill + decode + restored + load bytes: any change proves the engine
    queued: int  # requests the worker has, running or waiting


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """A meter's reading of a live worker."""

    model: str
    gen: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerLent:
    """KV beyond its assignment, out of what no worker was charged for; it keeps that until it exits."""

    model: str
    gen: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerFault:
    model: str
    gen: int
    code: str
    message: str
    fatal: bool  # the worker is about to exit


@dataclass(frozen=True, slots=True)
class WorkerExited:
    model: str
    gen: int
    code: int | None
    signal: int | None
    tail: str  # last stderr lines


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed `Machine.next_deadline()`."""


@dataclass(frozen=True, slots=True)
class SpawnsHeld:
    """No worker is started any more, and one of another build (`model`, `gen`) is not let in: the server is to start again."""

    reason: str
    model: str | None
    gen: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


WorkerEvent = WorkerHello | WorkerProgress | WorkerReady | WorkerBeat | WorkerMeasured | WorkerLent | WorkerFault | WorkerExited
CallEvent = LoadRequested | UnloadRequested | PinRequested | ResetRequested
SlotEvent = ModelsChanged | Acquire | Abandon | Release | CallEvent | WorkerEvent | GatewayLost | Tick | SpawnsHeld | Shutdown


# Effects


@dataclass(frozen=True, slots=True)
class Spawn:
    model: str
    gen: int


@dataclass(frozen=True, slots=True)
class AskStop:
    model: str
    gen: int
    reason: str
    flush_deadline_s: float


@dataclass(frozen=True, slots=True)
class Terminate:
    model: str
    gen: int


@dataclass(frozen=True, slots=True)
class Kill:
    model: str
    gen: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    model: str
    gen: int


@dataclass(frozen=True, slots=True)
class Granted:
    rid: str
    gateway: str
    lease: str
    model: str
    gen: int
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    rid: str
    gateway: str
    code: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class QueuedAt:
    """Sent when a request starts to wait and whenever its model's load gets further."""

    rid: str
    gateway: str
    position: int  # from 1, among the requests waiting for the same model
    state: SlotState


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone, or going, under a lease; nothing need be released."""

    lease: str
    gateway: str
    rid: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class CallDone:
    call: str
    ok: bool
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    """Kinds `slot` (every transition), `progress` (a load), `fault` (a worker's complaint), `gap` (nobody looked)."""

    kind: str
    model: str | None
    gen: int
    data: Mapping[str, object]


Effect = Spawn | AskStop | Terminate | Kill | DumpStacks | Granted | Rejected | QueuedAt | Lost | CallDone | Event


# What can be seen


@dataclass(frozen=True, slots=True)
class SlotView:
    model: str
    state: SlotState
    gen: int
    leases: int
    waiting: int
    stage: str
    done: int
    total: int
    charged_bytes: int
    measured_bytes: int
    since: float
    last_used: float
    last_error: str
    restarts: int
    backoff_until: float | None
    pinned: bool
    max_inflight: int


@dataclass(frozen=True, slots=True)
class BudgetView:
    budget_bytes: int
    charged_bytes: int
