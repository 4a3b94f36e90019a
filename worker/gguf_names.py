"""Which MLX parameter each GGUF tensor becomes, and what has to be undone on the way.

Pure: from tensor names and head counts to a plan in which every tensor and every parameter appears exactly once, or a
refusal naming the odd one out. It reads no weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.gguf import GgufFile, GgufTensor, ImportRefused

# llama.cpp's name of a tensor inside a block -> mlx-lm's.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

BLOCKS: dict[str, dict[str, str]] = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": _BLOCK | _HEAD_NORMS,
    "gemma3": _BLOCK | _HEAD_NORMS | _GEMMA_NORMS,
}
# Rotary factors are turned into the config's rope_scaling, not into a parameter.
CONFIG_TENSORS = frozenset({"rope_freqs.weight"})
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Mapped:
    """`rows` reorders the tensor's rows (None: as they are); `minus_one` takes back the 1 that llama.cpp adds to norms."""

    target: str
    tensor: GgufTensor
    rows: NDArray[np.intp] | None
    minus_one: bool


def architecture(file: GgufFile) -> str:
    """The GGUF architecture, where it is one that can be imported."""
    arch = file.architecture
    if arch not in BLOCKS:
        raise ImportRefused(
            "unsupported_architecture",
            f"the GGUF's architecture is {arch}; importable are {', '.join(sorted(BLOCKS))}. "
            "Look for an MLX or safetensors version of this model and add that instead.",
        )
    if file.integer(f"{arch}.expert_count"):
        raise ImportRefused("unsupported_architecture", f"this {arch} is a mixture of experts, which cannot be imported yet.")
    return arch


def has_bias(file: GgufFile, names: tuple[str, ...]) -> bool:
    return any(file.tensor(f"blk.0.{name}.bias") is not None for name in names)


def plan_tensors(file: GgufFile) -> list[Mapped]:
    """In the file's order. Raises ImportRefused for a tensor without a place, two for one place, and a place left empty."""
    arch = architecture(file)
    heads = file.needed(f"{arch}.attention.head_count")
    kv_heads = file.integer(f"{arch}.attention.head_count_kv") or heads
    expected = expected_parameters(file, arch)
    plan: dict[str, Mapped] = {}
    for tensor in file.tensors:
        if tensor.name in CONFIG_TENSORS:
            continue
        target = target_name(tensor.name, arch)
        if target is None or target not in expected:
            raise ImportRefused("unmapped_tensor", f"the tensor {tensor.name} has no place in MLX's {arch} model.")
        if target in plan:
            raise ImportRefused(
                "doubly_mapped_tensor", f"the tensors {plan[target].tensor.name} and {tensor.name} both claim {target}."
            )
        rows = rotary_order(tensor, heads, kv_heads) if arch == "llama" else None
        plan[target] = Mapped(target, tensor, rows, minus_one=arch == "gemma3" and "norm" in tensor.name)
    missing = sorted(expected - plan.keys())
    if missing:
        raise ImportRefused(
            "missing_tensor", f"the GGUF lacks {len(missing)} tensors of a {arch} model, among them the one for {missing[0]}."
        )
    return list(plan.values())


def target_name(name: str, arch: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = BLOCKS[arch].get(match[2]) if match else None
    return f"model.layers.{int(match[1])}.{part}.{kind}" if match and part else None


def expected_parameters(file: GgufFile, arch: str) -> set[str]:
    """Every parameter mlx-lm's model of this architecture has. An absent output layer means tied embeddings."""
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    if file.tensor("output.weight") is not None:
        expected.add("lm_head.weight")
    biased = _biased(file, arch)
    for layer in range(file.needed(f"{arch}.block_count")):
        expected |= {f"model.layers.{layer}.{part}.weight" for part in BLOCKS[arch].values()}
        expected |= {f"model.layers.{layer}.{BLOCKS[arch][name]}.bias" for name in biased}
    return expected


def _biased(file: GgufFile, arch: str) -> tuple[str, ...]:
    if arch == "qwen2":
        return ATTENTION[:3]
    if arch == "llama":
        return (ATTENTION if has_bias(file, ATTENTION) else ()) + (MLP if has_bias(file, MLP) else ())
    return ()


def rotary_order(tensor: GgufTensor, heads: int, kv_heads: int) -> NDArray[np.intp] | None:
    """llama.cpp interleaves the two rotary halves of each q and k head (only for `llama`); this order takes them apart."""
    name = tensor.name.split(".")[-2]
    if name not in ("attn_q", "attn_k"):
        return None
    count = heads if name == "attn_q" else kv_heads
    rows = tensor.shape[0]
    if rows % (2 * count):
        raise ImportRefused("damaged_gguf", f"{tensor.name} has {rows} rows, which {count} heads do not divide.")
    return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(rows)
