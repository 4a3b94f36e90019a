"""What is changed about how a model is loaded: optional features that cost or save memory, and can be done without. Pure."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from supervisor import budget
from supervisor.settings import ModelSettings

if TYPE_CHECKING:  # `omlxctl status` reads the settings, and has no time for the catalog
    from supervisor.catalog import Draft
    from supervisor.model_files import ModelFiles

Feature = Literal["draft_model", "kv_bits"]
DEFAULT_GROUP_SIZE = 64
DEFAULT_DRAFT_TOKENS = 3
"""As in mlx-lm."""


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
    draft: "Draft | None" = None
    draft_tokens: int = DEFAULT_DRAFT_TOKENS

    @property
    def features(self) -> tuple[Feature, ...]:
        """As their settings are called."""
        named: tuple[tuple[Feature, object], ...] = (("draft_model", self.draft), ("kv_bits", self.kv))
        return tuple(name for name, value in named if value is not None)

    def worker_settings(self) -> dict[str, object]:
        given: dict[str, object] = {}
        if self.kv is not None:
            given |= {"kv_bits": self.kv.bits, "kv_group_size": self.kv.group_size, "quantized_kv_start": self.kv.start}
        if self.draft is not None:
            given |= {"draft_model": self.draft.name, "draft_path": str(self.draft.path), "num_draft_tokens": self.draft_tokens}
            given["draft_model_type"] = self.draft.model_type
        return given

    def facts(self) -> list[object]:
        """What else tells two loads apart."""
        files = None if self.draft is None else self.draft.files
        return [] if files is None else [files.weights_bytes, files.changed]

    def load_sum(self, files: "ModelFiles", context_tokens: int) -> budget.LoadSum:
        own = self._own_sum(files, context_tokens)
        if self.draft is None:
            return own
        drafts = budget.load_sum(self.draft.files.weights_bytes, self.draft.files.kv_bytes_per_token, context_tokens)
        kv_floor_bytes = own.kv_floor_bytes + drafts.kv_floor_bytes
        return budget.LoadSum(own.weights_bytes + drafts.weights_bytes, own.runtime_bytes, kv_floor_bytes)

    def _own_sum(self, files: "ModelFiles", context_tokens: int) -> budget.LoadSum:
        plain = budget.load_sum(files.weights_bytes, files.kv_bytes_per_token, context_tokens)
        if self.kv is None:
            return plain
        early = budget.load_sum(files.weights_bytes, files.kv_bytes_per_token, min(context_tokens, self.kv.start))
        quantized_bytes = self.kv.bytes(plain.kv_floor_bytes, files.kv_element_bytes)
        kv_floor_bytes = max(quantized_bytes, early.kv_floor_bytes)
        return budget.LoadSum(plain.weights_bytes, plain.runtime_bytes, kv_floor_bytes)


def load_options(own: ModelSettings, draft: "Draft | None" = None) -> LoadOptions:
    kv = None
    if own.kv_bits is not None:
        kv = KvQuantizing(own.kv_bits, own.kv_group_size or DEFAULT_GROUP_SIZE, own.quantized_kv_start or 0)
    return LoadOptions(kv, draft, own.num_draft_tokens or DEFAULT_DRAFT_TOKENS)


def without_features(own: ModelSettings) -> ModelSettings:
    return replace(own, kv_bits=None, kv_group_size=None, quantized_kv_start=None, draft_model=None, num_draft_tokens=None)
