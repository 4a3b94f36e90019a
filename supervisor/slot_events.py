"""The contract between the slot machine and its shell: what can happen, and what is to be done about it.

Plain values only. The shell turns sockets, exits and clocks into events and effects into messages, processes and signals;
nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from supervisor.pressure import Level


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


# Events


@dataclass(frozen=True, slots=True)
class ModelCost:
    model: str
    load_bytes: int
    pinned: bool = False
    ttl_s: float | None = None  # unloaded after so long without a lease; None = never
    load_key: str = ""  # a worker loaded under another key is stale
    load_detail: str = ""  # how load_bytes came about, shown when a load is refused
    weights_bytes: int = 0  # part of load_bytes
    kv_bytes: int = 0  # part of load_bytes: what its worker may use for KV before anything is lent to it
    hot_bytes: int = 0  # beside load_bytes: the most RAM its prefix cache may have, as far as there is any
    known_bytes: int = 0  # what an earlier worker of this load key proved to need
    features: tuple[str, ...] = ()  # optional ones it is loaded with
    without: ModelCost | None = None  # the same model loaded without them
    known_shed: bool = False  # in an earlier life of the server it died with them


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
    hot_bytes: int = 0  # in the RAM tier of its prefix cache


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """A meter's reading of a live worker."""

    model: str
    gen: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerWants:
    """So much KV altogether: less than it has gives back what was lent to it."""

    model: str
    gen: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """The machine's memory as pressure.py judges it, at least once a second."""

    level: Level
    because: str  # why there is pressure
    budget_bytes: int
    budget_because: str  # why the budget is below what the policy says
    over_bytes: int  # how much should go for the pressure to end
    outside_bytes: int  # held by others than our processes, or by nobody that can be seen
    workers: Mapping[str, int]  # bytes by model that come back when its worker exits


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
    oom_killed: bool = False  # the system is known to have killed for memory just then


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway: str


@dataclass(frozen=True, slots=True)
class ClientsServed:
    """These are the models whose clients this gateway has to do with: some may only have to read what is finished."""

    gateway: str
    models: frozenset[str]


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


WorkerEvent = (
    WorkerHello | WorkerProgress | WorkerReady | WorkerBeat | WorkerMeasured | WorkerWants | WorkerFault | WorkerExited
)
CallEvent = LoadRequested | UnloadRequested | PinRequested | ResetRequested
SlotEvent = (
    ModelsChanged
    | Acquire
    | Abandon
    | Release
    | CallEvent
    | WorkerEvent
    | MemoryRead
    | GatewayLost
    | ClientsServed
    | Tick
    | SpawnsHeld
    | Shutdown
)


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
class TrimWorker:
    """Give back what is kept for later."""

    model: str
    gen: int
    level: Level
    target_bytes: int = 0  # of running answers' KV too; 0 leaves it to the worker


@dataclass(frozen=True, slots=True)
class GrantMemory:
    """What the worker may use from now on; None = as before."""

    model: str
    gen: int
    kv_bytes: int | None = None
    hot_bytes: int | None = None
    more_soon: bool = False
    """It asked for more KV than that, and hot caches shrink or models leave for it."""


@dataclass(frozen=True, slots=True)
class ReadMemory:
    """A MemoryRead is wanted soon: a worker is gone, and whether its memory is back decides about a load."""


@dataclass(frozen=True, slots=True)
class Remember:
    """Beyond the life of the server: what a model with this load key needs; 0 = nothing is known any more."""

    model: str
    load_key: str
    need_bytes: int


@dataclass(frozen=True, slots=True)
class RememberShed:
    """Beyond the life of the server: whether a model with this load key died with its optional features."""

    model: str
    load_key: str
    shed: bool


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
    """To be seen: kinds `slot` (every transition), `progress` (a load), `fault` (a worker's complaint), `gap` (time unheeded),
    `memory` (pressure, and memory that does not come back)."""

    kind: str
    model: str | None
    gen: int
    data: Mapping[str, object]


ToProcess = Spawn | AskStop | Terminate | Kill | DumpStacks | TrimWorker | GrantMemory
Effect = ToProcess | Granted | Rejected | QueuedAt | Lost | CallDone | Event | ReadMemory | Remember | RememberShed
