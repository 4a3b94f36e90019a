"""What can be seen of the slot machine: one slot, and the memory, at this moment. Values to read, never the record itself."""

from dataclasses import dataclass

from supervisor.pressure import Level
from supervisor.slot_events import SlotState


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
    past_peak_bytes: int  # of the charge: what it is only charged for having been larger once
    kv_granted_bytes: int
    hot_granted_bytes: int
    since: float
    last_used: float
    last_error: str
    restarts: int
    backoff_until: float | None
    pinned: bool
    max_inflight: int
    shed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BudgetView:
    budget_bytes: int  # now
    charged_bytes: int
    missing_bytes: int  # of workers that are gone, and not seen to be back
    weights_bytes: int  # of all live workers
    level: Level
    because: str  # why there is pressure
    detail: str  # how the budget came about, and why it is smaller now
