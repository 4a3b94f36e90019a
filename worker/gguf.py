"""A GGUF file as it lies on disk: typed metadata and the tensors' raw rows, over one file or a complete set of splits.

It knows the container and what can be wrong with it, and says so in `ImportRefused`; it knows nothing of MLX or of what a
tensor is for. Weights stay memory-mapped until somebody reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

MAGIC = b"GGUF"
SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")

Raw = NDArray[np.generic]
T = TypeVar("T")


class ImportRefused(Exception):
    """This file cannot become a model here, whatever is tried again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is (rows, columns) as numpy counts, the reverse of what GGUF lists; `data` has the same leading dimensions and
    holds the quantized blocks' bytes in the last one."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Raw


@dataclass(frozen=True, slots=True)
class GgufFile:
    source: Path
    fields: dict[str, object]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or "(none named)"

    def tensor(self, name: str) -> GgufTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        return value if isinstance(value, str) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        return bool(value) if isinstance(value, bool | int) else default

    def number(self, key: str) -> float | None:
        value = self.fields.get(key)
        return float(value) if isinstance(value, int | float) else None

    def integer(self, key: str) -> int | None:
        """Per-layer lists are taken where all layers agree."""
        value = self.fields.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # pyright: ignore[reportUnknownArgumentType] a list of anything
            value = value[0]  # pyright: ignore[reportUnknownVariableType] narrowed on the next line
        if isinstance(value, list):
            raise ImportRefused("unsupported_architecture", f"{key} differs between layers, which MLX's models cannot express.")
        return int(value) if isinstance(value, int | float) else None

    def needed(self, key: str) -> int:
        value = self.integer(key)
        if value is None:
            raise ImportRefused("missing_metadata", f"the GGUF has no {key}, without which the model cannot be built.")
        return value

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        value = self.fields.get(key)
        return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType] filtered


def open_gguf(source: Path) -> GgufFile:
    """Reads the headers of `source`, and of its sibling files if it is one part of a split model."""
    parts = _parts(source)
    readers = [_read(part) for part in parts]
    fields = dict(_fields(readers[0]))
    tensors = tuple(_tensors(readers))
    _check_split(fields, parts, len(tensors))
    return GgufFile(source, fields, tensors)


def _parts(source: Path) -> list[Path]:
    match = SPLIT_NAME.match(source.name)
    if match is None:
        return [source]
    count = int(match["count"])
    parts = [source.with_name(f"{match['stem']}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ImportRefused(
            "incomplete_split",
            f"{source.name} is one part of {count}; missing beside it: {', '.join(missing)}. Fetch them all.",
        )
    return parts


def _check_split(fields: dict[str, object], parts: list[Path], tensors: int) -> None:
    declared, total = fields.get("split.count"), fields.get("split.tensors.count")
    if isinstance(declared, int) and declared > 1 and declared != len(parts):
        raise ImportRefused(
            "incomplete_split",
            f"{parts[0].name} says it is one part of {declared}. Put all parts in one directory under their original names "
            f"(…-00001-of-{declared:05}.gguf).",
        )
    if isinstance(total, int) and total and total != tensors:
        raise ImportRefused("incomplete_split", f"the parts hold {tensors} tensors where the first one promises {total}.")


def _read(path: Path) -> GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ImportRefused("unreadable", f"{path} cannot be read: {error.strerror}.") from error
    if magic != MAGIC:
        raise ImportRefused("not_gguf", f"{path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}.")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        if "duplicated tensor" in str(error):
            raise ImportRefused("doubly_mapped_tensor", f"{path}: {error}.") from error
        size_bytes = path.stat().st_size
        raise ImportRefused(
            "damaged_gguf", f"{path} is cut short or damaged ({size_bytes:,} bytes are there; {error}). Fetch it again."
        ) from error
    if reader.byte_order != "I":
        raise ImportRefused("unsupported_byte_order", f"{path} was written for the other byte order. Fetch the usual variant.")
    return reader


def _fields(reader: GGUFReader) -> Iterator[tuple[str, object]]:
    for name, field in reader.fields.items():
        try:
            yield name, field.contents()
        except UnicodeDecodeError as error:
            raise ImportRefused("damaged_gguf", f"the metadata {name} is not valid UTF-8: {error}.") from error


def _tensors(readers: list[GGUFReader]) -> Iterator[GgufTensor]:
    for reader in readers:
        for tensor in reader.tensors:
            shape = tuple(int(length) for length in reversed(tensor.shape.tolist()))
            yield GgufTensor(tensor.name, tensor.tensor_type, shape, tensor.data)
