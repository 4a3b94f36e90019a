"""What the slot machine and the gauge of pressure learn from the settings: how much memory there is, how long things take."""

from supervisor import budget, hardware, pressure
from supervisor.settings import Settings
from supervisor.settings_values import Size
from supervisor.slot_rules import Policy, Timers


def budget_sum(settings: Settings) -> budget.BudgetSum:
    total = hardware.total_ram_bytes()
    memory = settings.memory
    return budget.BudgetSum(
        total_ram_bytes=total,
        reserve_bytes=budget.reserve_bytes(total, budget.Tier(memory.memory_tier)),
        metal_cap_bytes=budget.metal_cap_bytes(total, hardware.wired_limit_bytes()) if hardware.has_metal() else None,
        models_limit_bytes=_of(memory.max_model_memory, total),
        tree_limit_bytes=_of(memory.max_process_memory, total),
    )


def policy(settings: Settings, given: budget.BudgetSum) -> Policy:
    return Policy(
        given.total_bytes,
        settings.scheduler.max_queue,
        settings.scheduler.max_concurrent_total,
        weights_limit_bytes=_of(settings.memory.max_model_weights, given.total_ram_bytes),
        budget_detail=str(given),
    )


def thresholds(settings: Settings) -> pressure.Thresholds:
    memory = settings.memory
    tier = budget.Tier(memory.memory_tier)
    return pressure.thresholds(tier, memory.soft_threshold, memory.hard_threshold, memory.critical_threshold)


def timers(settings: Settings) -> Timers:
    given = settings.timers
    return Timers(**{name: getattr(given, name) for name in given.__dataclass_fields__})


def _of(limit: Size | None, total_bytes: int) -> int | None:
    return None if limit is None else limit.of(total_bytes)
