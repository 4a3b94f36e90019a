"""Writes converted weights as safetensors shards of bounded size, with an index where there are several.

The header of a shard is known before its first tensor is converted, so each is written as soon as it is made and no more than
one tensor is in memory. (safetensors' own writer wants a whole shard at once.) It knows nothing of GGUF.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from worker.gguf_names import Mapped
from worker.gguf_tensors import STORED, Layout, convert, specs

SHARD_BYTES = 2 << 30


def weights_bytes(plan: list[Mapped], layout: Layout) -> int:
    return sum(spec.size_bytes for mapped in plan for spec in specs(mapped, layout))


def write_weights(
    directory: Path, plan: list[Mapped], layout: Layout, progress: Callable[[int], None], limit_bytes: int = SHARD_BYTES
) -> None:
    """`progress` is called with the number of GGUF tensors done."""
    shards = list(_shards(plan, layout, limit_bytes))
    where: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / name).open("wb") as file:
            where |= dict.fromkeys(_write_header(file, shard, layout), name)
            for mapped in shard:
                _write_arrays(file, mapped, layout)
                done += 1
                progress(done)
    if len(shards) > 1:
        index = {"metadata": {"total_size": weights_bytes(plan, layout)}, "weight_map": dict(sorted(where.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_header(file: BinaryIO, shard: list[Mapped], layout: Layout) -> list[str]:
    """8 bytes of length, then JSON padded to 8; returns the names in it."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    names: list[str] = []
    offset = 0
    for spec in (spec for mapped in shard for spec in specs(mapped, layout)):
        end = offset + spec.size_bytes
        header[spec.name] = {"dtype": STORED[spec.dtype][0], "shape": spec.shape, "data_offsets": [offset, end]}
        names.append(spec.name)
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    return names


def _write_arrays(file: BinaryIO, mapped: Mapped, layout: Layout) -> None:
    for spec, array in zip(specs(mapped, layout), convert(mapped, layout), strict=True):
        assert array.nbytes == spec.size_bytes, f"{spec.name}: {array.nbytes} bytes where {spec.size_bytes} were promised"
        file.write(np.ascontiguousarray(array).data)


def _shards(plan: list[Mapped], layout: Layout, limit_bytes: int) -> Iterator[list[Mapped]]:
    shard: list[Mapped] = []
    size_bytes = 0
    for mapped in plan:
        need_bytes = sum(spec.size_bytes for spec in specs(mapped, layout))
        if shard and size_bytes + need_bytes > limit_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append(mapped)
        size_bytes += need_bytes
    yield shard


def sync_to_disk(directory: Path) -> None:
    """Everything written so far survives a power cut before the directory gets its visible name."""
    for path in [*directory.rglob("*"), directory]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
