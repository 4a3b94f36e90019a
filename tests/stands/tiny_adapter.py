"""LoRA adapters for `tiny_model()`, made as mlx-lm makes them, with random but repeatable values that change every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from worker.blas import load_openblas

LORA = {"rank": 4, "scale": 8.0, "dropout": 0.5, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}


def tiny_adapter(path: Path, base: Path, seed: int = 0, named_base: str | None = None) -> Path:
    """`named_base` is what its adapter_config.json says it was trained on."""
    load_openblas()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    path.mkdir(parents=True, exist_ok=True)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (path / "adapter_config.json").write_text(json.dumps(config | ({"model": named_base} if named_base else {})))
    model, _ = load_model(base)
    model.freeze()
    linear_to_lora_layers(model, 2, LORA)
    keys = mx.random.split(mx.random.key(seed), 64)
    shapes = [
        (name, array.shape) for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.trainable_parameters()))
    ]
    tensors = {name: mx.random.normal(shape, key=keys[i]) * 0.3 for i, (name, shape) in enumerate(shapes)}
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    return path
