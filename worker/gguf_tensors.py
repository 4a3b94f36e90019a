"""The arithmetic on weights: GGUF blocks to floats, or repacked losslessly into MLX's affine quantization.

It knows block layouts and dtypes, not names or files. One call handles one tensor, so no more than one is ever in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize
from numpy.typing import NDArray

from worker.gguf import GgufTensor, ImportRefused
from worker.gguf_names import Mapped

Dtype = Literal["float32", "float16", "bfloat16"]
Array = NDArray[np.generic]
Policy = Literal["float32", "float16", "bfloat16", "keep"]

# The block of Q4_0, Q4_1 and Q8_0, which MLX's affine quantization can have as its group.
GROUP_SIZE = 32
AFFINE_BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}
_FLOAT_KINDS: dict[Kind, Dtype] = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}
# safetensors' names, and bytes per element.
STORED = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "uint32": ("U32", 4)}


@dataclass(frozen=True, slots=True)
class Spec:
    """One array of the model as it goes to disk. `dtype` is one of STORED's."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * STORED[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the weights become: `dtype` of everything that is not packed, and the tensors (by target) that stay packed."""

    dtype: Dtype
    packed_bits: dict[str, int]

    def quantization(self) -> dict[str, object] | None:
        """config.json's entry in mlx-lm's form: the commonest width, and an override per layer that has another."""
        if not self.packed_bits:
            return None
        commonest = Counter(self.packed_bits.values()).most_common(1)[0][0]
        entry: dict[str, object] = {"group_size": GROUP_SIZE, "bits": commonest, "mode": "affine"}
        for target, bits in self.packed_bits.items():
            if bits != commonest:
                entry[target.removesuffix(".weight")] = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
        return entry


def choose_layout(plan: list[Mapped], policy: Policy, on_gpu: bool) -> Layout:
    if policy != "keep":
        return Layout(policy, {})
    matrices = [mapped for mapped in plan if len(mapped.tensor.shape) == 2]
    packed = {mapped.target: AFFINE_BITS[mapped.tensor.kind] for mapped in matrices if mapped.tensor.kind in AFFINE_BITS}
    kinds = {mapped.tensor.kind for mapped in matrices}
    only = kinds.pop() if len(kinds) == 1 else None
    if only is not None and only in _FLOAT_KINDS:  # a file that is all of one float type keeps it
        return Layout(_FLOAT_KINDS[only], packed)
    # float16 is the type of GGUF's own scales, so packed weights stay exact in either. MLX's CPU build computes packed weights
    # 40 times slower in float16 than in float32 (5.2 s and 0.12 s a token, 135M parameters).
    return Layout("float16" if on_gpu else "float32", packed)


def specs(mapped: Mapped, layout: Layout) -> list[Spec]:
    """What `convert` will return for it, in that order, before any weight is read."""
    bits = layout.packed_bits.get(mapped.target)
    shape = mapped.tensor.shape
    if bits is None:
        return [Spec(mapped.target, layout.dtype, shape)]
    layer = mapped.target.removesuffix(".weight")
    groups = (shape[0], shape[1] // GROUP_SIZE)
    packed = Spec(mapped.target, "uint32", (shape[0], shape[1] * bits // 32))
    return [packed, Spec(f"{layer}.scales", layout.dtype, groups), Spec(f"{layer}.biases", layout.dtype, groups)]


def convert(mapped: Mapped, layout: Layout) -> list[Array]:
    """The arrays of `specs`: one, or weight codes, scales and biases. bfloat16 comes as its bits in uint16."""
    data = mapped.tensor.data if mapped.rows is None else mapped.tensor.data[mapped.rows]
    if mapped.target in layout.packed_bits:
        codes, scales, biases = _packed(mapped.tensor, data)
        return [codes, scales.astype(layout.dtype), biases.astype(layout.dtype)]
    values = to_float32(mapped.tensor, data)
    if mapped.minus_one:
        values = values - np.float32(1)
    return [_narrowed(values, layout.dtype, mapped.tensor.name)]


def to_float32(tensor: GgufTensor, data: Array) -> NDArray[np.float32]:
    if tensor.kind == Kind.F64:
        return data.astype(np.float32)
    try:
        return dequantize(data, tensor.kind).reshape(tensor.shape).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ImportRefused(
            "unsupported_quantization",
            f"{tensor.name} is quantized as {tensor.kind.name}, which cannot be read. Take another quantization of this model.",
        ) from error


def _narrowed(values: NDArray[np.float32], dtype: Dtype, name: str) -> Array:
    if dtype == "float32":
        return values
    if dtype == "bfloat16":  # numpy has no bfloat16: its bits are the upper half of float32's, rounded to nearest even
        bits = values.view(np.uint32)
        return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ImportRefused("float16_overflow", f"{name} has values that float16 cannot hold. Import with --dtype bfloat16.")
    return half


def _packed(tensor: GgufTensor, data: Array) -> tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.float16]]:
    rows, columns = tensor.shape
    blocks = data.reshape(rows, columns // GROUP_SIZE, -1).view(np.uint8)
    codes, scales, biases = _affine(blocks, tensor.kind)
    return np.ascontiguousarray(codes).view(np.uint32).reshape(rows, -1), scales, biases


def _affine(blocks: NDArray[np.uint8], kind: Kind) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Blocks of 32 as w = scale·code + bias. Each bias is a power of two times a float16, so nothing is rounded."""
    scales = _half(blocks, 0)
    if kind == Kind.Q8_0:  # d, then 32 signed bytes
        return blocks[..., 2:] ^ np.uint8(0x80), scales, scales * np.float16(-128)
    if kind == Kind.Q4_0:  # d, then 16 bytes of codes around 8
        return _nibbles(blocks[..., 2:]), scales, scales * np.float16(-8)
    return _nibbles(blocks[..., 4:]), scales, _half(blocks, 2)  # Q4_1: d, m, then 16 bytes


def _half(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0].astype(np.float16)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """GGUF keeps elements 0–15 in the low and 16–31 in the high halves; MLX wants neighbours in one byte, low half first."""
    flat = np.concatenate([codes & np.uint8(0x0F), codes >> np.uint8(4)], axis=-1)
    return flat[..., 0::2] | (flat[..., 1::2] << np.uint8(4))
