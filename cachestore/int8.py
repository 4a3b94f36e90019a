"""Rows of keys and values at eight bits: symmetric, one scale for each run of up to 64 numbers of one head of one token.

Takes 0.53 of what bf16 takes, and is not exact: opt-in, and part of the namespace's layout, so that no exact block is ever
mixed with one of these. State that sums up a whole past is left as it is, and so are rows that are packed already.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachestore.block import BadBlock, BadReason, Tensor

NAME: Final = "int8"
ROWS: Final = "kv"
"""Begins the names of row tensors, `[arrays, 1, heads, tokens, numbers]`."""
RUN: Final = 64
_MARK, _SCALE = ".i8.", ".scale"
_FLOATS: Final[Mapping[str, type[np.generic]]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
Floats = NDArray[np.float32]


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they go to disk."""
    if any(name.startswith(ROWS) and tensor.dtype not in _FLOATS for name, tensor in tensors.items()):
        return dict(tensors)
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        packed |= _packed(name, tensor) if name.startswith(ROWS) else {name: tensor}
    return packed


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they were, up to rounding. Raises BadBlock."""
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name, mark, dtype = stored.partition(_MARK)
        if mark:
            found[name] = _unpacked(tensor, tensors.get(name + _SCALE), dtype)
        elif not stored.endswith(_SCALE):
            found[stored] = tensor
    return found


def _packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    numbers = _to_float(tensor)
    if not numbers.size or not np.isfinite(numbers).all():
        return {name: tensor}
    runs = numbers.reshape(*tensor.shape[:-1], -1, _run(tensor.shape[-1]))
    scales = np.abs(runs).max(axis=-1) / np.float32(127)
    codes = np.rint(runs / np.where(scales > 0, scales, np.float32(1))[..., None]).astype(np.int8)
    return {
        f"{name}{_MARK}{tensor.dtype}": Tensor("I8", tensor.shape, codes.tobytes()),
        name + _SCALE: Tensor("F32", scales.shape, scales.tobytes()),
    }


def _unpacked(codes: Tensor, scales: Tensor | None, dtype: str) -> Tensor:
    if dtype not in _FLOATS or codes.dtype != "I8" or not codes.shape or scales is None or scales.dtype != "F32":
        raise BadBlock(BadReason.TENSORS)
    run = _run(codes.shape[-1])
    if not run or scales.shape != (*codes.shape[:-1], codes.shape[-1] // run):
        raise BadBlock(BadReason.TENSORS)
    runs = np.frombuffer(codes.data, np.int8).reshape(*scales.shape, run)
    numbers = runs * np.frombuffer(scales.data, np.float32).reshape(scales.shape)[..., None]
    return Tensor(dtype, codes.shape, _from_float(numbers, dtype))


def _run(numbers: int) -> int:
    return RUN if numbers % RUN == 0 else numbers


def _to_float(tensor: Tensor) -> Floats:
    raw = np.frombuffer(tensor.data, _FLOATS[tensor.dtype])
    if tensor.dtype == "BF16":  # its bits are the upper half of a float32's
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def _from_float(numbers: Floats, dtype: str) -> bytes:
    if dtype != "BF16":
        return numbers.astype(_FLOATS[dtype]).tobytes()
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    nearest_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest_even >> np.uint32(16)).astype(np.uint16).tobytes()
