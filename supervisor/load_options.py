"""What is changed about how a model is loaded: optional features that cost or save memory, and can be done without. Pure."""

from dataclasses import dataclass
from typing import Literal

from supervisor import budget
from supervisor.model_files import ModelFiles
from supervisor.settings import ModelSettings

Feature = Literal["kv_bits"]
DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True, slots=True)
class KvQuantizing:
    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    start: int = 0
    """Tokens that are kept as they are until there are more."""

    def bytes(self, plain_bytes: int, element_bytes: int) -> int:
        """Of what takes `plain_bytes`; every group has a scale and a bias beside its numbers."""
        per_number = self.bits / 8 + 2 * element_bytes / self.group_size
        return int(plain_bytes * per_number / element_bytes)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    kv: KvQuantizing | None = None

    @property
    def features(self) -> tuple[Feature, ...]:
        """As their settings are called."""
        return ("kv_bits",) if self.kv is not None else ()

    def worker_settings(self) -> dict[str, object]:
        if self.kv is None:
            return {}
        return {"kv_bits": self.kv.bits, "kv_group_size": self.kv.group_size, "quantized_kv_start": self.kv.start}

    def load_sum(self, files: ModelFiles, context_tokens: int) -> budget.LoadSum:
        plain = budget.load_sum(files.weights_bytes, files.kv_bytes_per_token, context_tokens)
        if self.kv is None:
            return plain
        early = budget.load_sum(files.weights_bytes, files.kv_bytes_per_token, min(context_tokens, self.kv.start))
        quantized_bytes = self.kv.bytes(plain.kv_floor_bytes, files.kv_element_bytes)
        kv_floor_bytes = max(quantized_bytes, early.kv_floor_bytes)
        return budget.LoadSum(plain.weights_bytes, plain.runtime_bytes, kv_floor_bytes)


def load_options(own: ModelSettings) -> LoadOptions:
    if own.kv_bits is None:
        return LoadOptions()
    return LoadOptions(KvQuantizing(own.kv_bits, own.kv_group_size or DEFAULT_GROUP_SIZE, own.quantized_kv_start or 0))


def contradictions(model: str, own: ModelSettings, base: ModelSettings) -> list[str]:
    """Settings that need another one to mean anything. `base` is what an adapter takes over."""
    needy = ("kv_group_size", "quantized_kv_start") if own.kv_bits is None and base.kv_bits is None else ()
    set_here = [name for name in needy if getattr(own, name) is not None]
    return [f"models.{model}.{name}: it means nothing without models.{model}.kv_bits" for name in set_here]
