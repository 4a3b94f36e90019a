"""Are these weights whole? Answered from headers and sizes, before a byte of them is read.

MLX would report a truncated shard late or, as it reads lazily, not at all. Must not import MLX: it runs before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from worker.faults import ModelUnloadable
from worker.model_files import ModelFiles, ModelUnreadable

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapters.safetensors"
"""Names that mlx_lm gives them."""
HEADER_MAX_BYTES = 100 << 20
"""The limit of the safetensors format itself."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    config: Mapping[str, object]
    shards: tuple[Path, ...]
    adapter: Path | None = None
    """Directory of the LoRA adapter to be put on."""
    model_type: str | None = None
    """In place of what config.json says."""

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return self.shards if self.adapter is None else (*self.shards, self.adapter / ADAPTER_TENSORS)

    @property
    def configs(self) -> tuple[Path, ...]:
        own = () if self.adapter is None else (self.adapter / ADAPTER_CONFIG,)
        return (self.path / "config.json", *own)


def open_checkpoint(
    path: Path, adapter: Path | None = None, *, trust_remote_code: bool = False, model_type: str | None = None
) -> Checkpoint:
    """Raises ModelUnloadable, naming the file and what is wrong with it."""
    try:
        config = ModelFiles.read(path).config
    except ModelUnreadable as e:
        raise ModelUnloadable(str(e)) from e
    if model_type is not None:
        config = {**config, "model_type": model_type}
    if not isinstance(config.get("model_type"), str):
        raise ModelUnloadable(f"{path / 'config.json'} names no model_type.")
    if config.get("model_file") is not None and not trust_remote_code:
        raise ModelUnloadable(
            f"{path.name} wants to run its own code ({config['model_file']}). Set trust_remote_code for this model to allow it."
        )
    shards = tuple(sorted(path.glob("model*.safetensors")))  # the pattern mlx_lm loads
    if not shards:
        raise ModelUnloadable(f"{path} has no model*.safetensors file.")
    _check_index(path / "model.safetensors.index.json", {shard.name for shard in shards})
    for shard in shards:
        _check_shard(shard)
    if adapter is not None:
        _check_shard(adapter / ADAPTER_TENSORS)
    return Checkpoint(path, config, shards, adapter, model_type)


def _check_index(index: Path, present: set[str]) -> None:
    if not index.exists():
        return
    described = _json(index.read_bytes())
    names = None if described is None else described.get("weight_map")
    if not isinstance(names, dict):
        raise ModelUnloadable(f"{index} is damaged.")
    missing = sorted({str(name) for name in cast("dict[str, object]", names).values()} - present)
    if missing:
        raise ModelUnloadable(f"{index.parent.name} lacks {len(missing)} of its weight files, first {missing[0]}.")


def _check_shard(shard: Path) -> None:
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length) if length <= HEADER_MAX_BYTES else b""
    except OSError as e:
        raise ModelUnloadable(f"{shard} cannot be read: {e.strerror}") from e
    end = _payload_end(head) if len(head) == length else None
    if end is None:
        raise ModelUnloadable(f"{shard} has no readable safetensors header: damaged or not fully downloaded.")
    if size < 8 + length + end:
        raise ModelUnloadable(f"{shard} is truncated: {size} bytes of {8 + length + end}.")


def _payload_end(head: bytes) -> int | None:
    described = _json(head)
    if described is None:
        return None
    end = 0
    for name, tensor in described.items():
        if name == "__metadata__":
            continue
        match tensor:
            case {"data_offsets": [int(), int(stop)]}:
                end = max(end, stop)
            case _:
                return None
    return end


def _json(data: bytes) -> dict[str, object] | None:
    try:
        found: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) else None
