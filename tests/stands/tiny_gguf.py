"""GGUF files of a few hundred kilobytes with random weights, written with gguf's own writer.

One architecture, any mix of tensor types, and hooks to spoil them. They have real vocabularies, so a reference runtime loads
them too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, RopeScalingType, quants
from numpy.typing import NDArray

from tests.stands.models import tiny_tokenizer

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 256, 4, 2, 16, 512
SPEAKABLE = frozenset(map(chr, range(32, 127))) | {"Ġ", "▁"}
# Gemma 3 needs one of its layers that see everything, which is every sixth.
LAYERS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3": 6}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`kinds` maps a part of a tensor's name to its type (default F32); `extra` adds or replaces tensors; `skip` drops them."""

    arch: str = "llama"
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    extra: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    declared_arch: str | None = None
    split_max_tensors: int = 0
    linear_rope_factor: float | None = None
    pre: str = "gpt-2"
    integers: Mapping[str, int] = field(default_factory=dict)
    sampling_temperature: float | None = None
    tool_template: str | None = None


def write_gguf(path: Path, recipe: Recipe = Recipe()) -> Path:
    """Returns the path to import (the first part of a split)."""
    writer = GGUFWriter(path, recipe.declared_arch or recipe.arch, split_max_tensors=recipe.split_max_tensors)
    tokens = _write_vocabulary(writer, recipe)
    _write_hyperparameters(writer, recipe)
    for name, values in weights(recipe, tokens).items():
        kind = next((kind for part, kind in recipe.kinds.items() if part in name and values.ndim == 2), Kind.F32)
        data = _random_q6_k(values.shape) if kind == Kind.Q6_K else quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def weights(recipe: Recipe, tokens: list[str]) -> dict[str, NDArray[np.float32]]:
    """What the tensors were before quantization, as llama.cpp arranges them."""
    vocab_size = len(tokens)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if recipe.arch != "gemma3":
        shapes["output.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS[recipe.arch]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _block(recipe.arch).items()}
    made = {name: _random(name, shape) for name, shape in shapes.items() if name not in recipe.skip}
    # Tokens that end an answer, or are only a part of a character (the reference runtime does not report those), are never
    # the likeliest.
    quiet = [i for i, token in enumerate(tokens) if token.startswith("<") or not set(token) <= SPEAKABLE]
    made["output.weight" if "output.weight" in made else "token_embd.weight"][quiet] = 0
    return made | dict(recipe.extra)


def _block(arch: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if arch == "qwen2":
        block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch in ("qwen3", "gemma3"):
        block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch == "gemma3":
        block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    return block


def _random(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    if len(shape) == 2:
        return values / np.float32(np.sqrt(shape[-1]))
    return np.float32(1) + values / np.float32(4)  # norms away from 1, biases away from 0


def _random_q6_k(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """gguf cannot quantize to Q6_K, but any bytes are a valid block once its scale is a sane float16."""
    blocks = np.random.default_rng(6).integers(0, 256, (shape[0], shape[1] // 256, 210), dtype=np.uint8)
    blocks[..., -2:] = np.array([1e-5], dtype=np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _write_hyperparameters(writer: GGUFWriter, recipe: Recipe) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS[recipe.arch])
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if recipe.arch in ("qwen3", "gemma3"):
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    if recipe.arch == "gemma3":
        writer.add_sliding_window(8)  # shorter than the prompts of the tests, so that it matters
    if recipe.linear_rope_factor is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(recipe.linear_rope_factor)
    if recipe.sampling_temperature is not None:
        writer.add_float32("general.sampling.temp", recipe.sampling_temperature)
    for key, value in recipe.integers.items():
        writer.add_uint32(key, value)


def _write_vocabulary(writer: GGUFWriter, recipe: Recipe) -> list[str]:
    tokens, types = _sentencepiece(writer) if recipe.arch == "gemma3" else _byte_level(writer, recipe.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if recipe.tool_template is None:
        writer.add_chat_template(CHAT_TEMPLATE)
    else:
        named = {"default": CHAT_TEMPLATE, "tool_use": recipe.tool_template}
        writer.add_chat_template([{"name": name, "template": template} for name, template in named.items()])
    return tokens


def _byte_level(writer: GGUFWriter, pre: str) -> tuple[list[str], list[int]]:
    model = json.loads(tiny_tokenizer().tokenizer_json)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    return tokens, [3 if token.startswith("<|") else 1 for token in tokens]


def _sentencepiece(writer: GGUFWriter) -> tuple[list[str], list[int]]:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    own = ["\n", "\n\n", "  ", "   ", "<b>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁the", "the", "▁t", "▁a", "he", "in", "er", "▁an", "and", "▁and", "▁of", "of", "ing", "▁in", "qu", "ca", "▁ca"]
    words += ["▁cap", "ital", "▁capital", "it", "al", "tal"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!é日"]
    tokens = [*control, *own, *raw, *words, *letters]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    framed = len(control) + len(own) + len(raw)
    writer.add_token_scores([-1000.0] * framed + [float(-rank) for rank in range(len(tokens) - framed)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return tokens, [3] * len(control) + [4] * len(own) + [6] * len(raw) + [1] * (len(tokens) - framed)


def as_float32(source: Path, target: Path) -> Path:
    """The same model with every tensor dequantized, so that a reference runtime computes with what an import reads."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        writer.add_tensor(tensor.name, quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
