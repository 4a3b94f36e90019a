"""What the slot machine is told once, at the start: how much memory there is to give and how long each thing may take."""

from supervisor import budget, hardware
from supervisor.settings import Settings
from supervisor.slot_events import Timers


def budget_bytes(settings: Settings) -> int:
    total = hardware.total_ram_bytes()
    memory = settings.memory
    limits = [size.of(total) for size in (memory.max_model_memory, memory.max_process_memory) if size is not None]
    cap = budget.metal_cap_bytes(total, hardware.wired_limit_bytes()) if hardware.has_metal() else None
    return budget.budget_bytes(total, budget.Tier(memory.memory_tier), limits, cap)


def timers(settings: Settings) -> Timers:
    given = settings.timers
    return Timers(**{name: getattr(given, name) for name in given.__dataclass_fields__})
