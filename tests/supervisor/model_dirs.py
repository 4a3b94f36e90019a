"""Model directories as far as the supervisor reads them: config, headers of weights, a tokenizer's presence."""

import json
import struct
from pathlib import Path

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}


def shard(path: Path, tensors: dict[str, tuple[str, int]], cut: int = 0) -> Path:
    """A safetensors file of zeros with tensors {name: (dtype, bytes)}; `cut` bytes are missing at its end."""
    header, at = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + b"\0" * at)[: None if not cut else -cut])
    return path


def model(directory: Path, config: dict[str, object] | None = None, **overrides: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**(config or CONFIG), **overrides}))
    shard(directory / "model.safetensors", {"w": ("BF16", 4000)})
    (directory / "tokenizer.json").write_text("{}")
    return directory
