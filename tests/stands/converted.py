"""Models of a test as others would have them: with the same weights in half precision, or quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx

FILE = "model.safetensors"


def in_dtype(source: Path, target: Path, dtype: mx.Dtype) -> Path:
    shutil.copytree(source, target)
    weights = {name: array.astype(dtype) for name, array in cast("dict[str, mx.array]", mx.load(str(source / FILE))).items()}
    mx.save_safetensors(str(target / FILE), weights, metadata={"format": "mlx"})
    return target


def quantized(source: Path, target: Path, bits: int = 4, group_size: int = 32) -> Path:
    """All matrices, as mlx_lm.convert does it."""
    shutil.copytree(source, target)
    weights: dict[str, mx.array] = {}
    for name, array in cast("dict[str, mx.array]", mx.load(str(source / FILE))).items():
        if array.ndim < 2:
            weights[name] = array
            continue
        stem = name.removesuffix("weight")
        weights[name], weights[f"{stem}scales"], weights[f"{stem}biases"] = mx.quantize(array, group_size=group_size, bits=bits)
    mx.save_safetensors(str(target / FILE), weights, metadata={"format": "mlx"})
    config = json.loads((source / "config.json").read_text()) | {"quantization": {"bits": bits, "group_size": group_size}}
    (target / "config.json").write_text(json.dumps(config))
    return target
