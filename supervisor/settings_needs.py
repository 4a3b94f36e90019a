"""Settings that mean nothing without, or beside, another one. Pure, and imports little: every command checks the settings."""

from itertools import pairwise

from supervisor.budget import Tier
from supervisor.pressure import SOFT_SHARES
from supervisor.settings import MemorySettings, ModelSettings


def contradictions(model: str, own: ModelSettings, base: ModelSettings) -> list[str]:
    """Settings that need another one to mean anything. `base` is what an adapter takes over."""
    needed = {"kv_group_size": "kv_bits", "quantized_kv_start": "kv_bits", "num_draft_tokens": "draft_model"}
    return [
        f"models.{model}.{name}: it means nothing without models.{model}.{other}"
        for name, other in needed.items()
        if getattr(own, name) is not None and getattr(own, other) is None and getattr(base, other) is None
    ]


def falling(memory: MemorySettings) -> list[str]:
    """Levels of pressure that would begin below the one before."""
    soft = SOFT_SHARES[Tier(memory.memory_tier)] if memory.soft_threshold is None else memory.soft_threshold
    marks = {"soft": soft, "hard": memory.hard_threshold, "critical": memory.critical_threshold}
    given = [(name, mark) for name, mark in marks.items() if mark is not None]
    return [
        f"memory.{name}_threshold: {mark:g} is below {lower}_threshold, which is {least:g}"
        for (lower, least), (name, mark) in pairwise(given)
        if mark < least
    ]
