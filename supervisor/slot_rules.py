"""What the slot machine is told once: its times, and how much there is to share. From the settings, by way of policy.py."""

from dataclasses import dataclass

from supervisor.budget import MIB


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
    memory_back_s: float = 10
    memory_wait_s: float = 30


@dataclass(frozen=True, slots=True)
class Policy:
    budget_bytes: int
    max_queue: int = 64  # leases a model may have beyond what its worker runs at once
    max_total: int | None = None  # leases of all models together; as many as `max_queue` requests may wait for one beyond them
    weights_limit_bytes: int | None = None  # of the weights of all loaded models together
    budget_detail: str = ""  # how budget_bytes came about, shown when a load is refused
    noise_bytes: int = 32 * MIB  # of memory that is not back after an exit: other programs come and go
