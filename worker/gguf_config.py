"""config.json and generation_config.json from a GGUF's metadata, in the keys that mlx-lm's model classes read.

Pure, and it reads no weights except the rotary factors, from which the Llama 3 scaling is recovered.
"""

from __future__ import annotations

import math

import numpy as np
from gguf import dequantize

from worker.gguf import GgufFile, GgufTensor, ImportRefused
from worker.gguf_names import ATTENTION, MLP, architecture, has_bias
from worker.gguf_tensors import Layout
from worker.gguf_tokenizer import TokenType

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# The depth of Gemma 3 27B, the one size that scales attention by its hidden size instead of its head size.
GEMMA3_27B_LAYERS = 62
# Control tokens that end a turn in some chat format although their GGUF may name only one as end of sequence.
END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
    }
)
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def model_config(file: GgufFile, layout: Layout) -> dict[str, object]:
    arch = architecture(file)
    hidden, heads = file.needed(f"{arch}.embedding_length"), file.needed(f"{arch}.attention.head_count")
    head_dim = _head_dim(file, arch, hidden, heads)
    config: dict[str, object] = {
        "architectures": [CLASSES[arch]],
        "model_type": MODEL_TYPES[arch],
        "hidden_size": hidden,
        "intermediate_size": file.needed(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.needed(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{arch}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": _short(file.number(f"{arch}.attention.layer_norm_rms_epsilon") or 1e-6),
        "rope_theta": _short(file.number(f"{arch}.rope.freq_base") or 10000.0),
        "max_position_embeddings": file.needed(f"{arch}.context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": file.tensor("output.weight") is None,
        "torch_dtype": layout.dtype,
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(file),
    }
    config |= _special_to(file, arch, config, head_dim)
    scaling = _rope_scaling(file, arch, head_dim)
    if scaling:
        config["rope_scaling"] = scaling
    quantization = layout.quantization()
    if quantization:
        config["quantization"] = quantization
    return {key: value for key, value in config.items() if value is not None}


def generation_config(file: GgufFile) -> dict[str, object]:
    config: dict[str, object] = {
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(file),
        "pad_token_id": file.integer("tokenizer.ggml.padding_token_id"),
    }
    for key, name in _SAMPLING.items():
        value = file.number(key)
        if value is not None:
            config[name] = int(value) if name == "top_k" else _short(value)
    return {key: value for key, value in config.items() if value is not None}


def end_token_ids(file: GgufFile) -> list[int]:
    """The end of sequence first, then what else ends a turn."""
    named = (file.integer(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    tokens, types = file.list_of("tokenizer.ggml.tokens", str), file.list_of("tokenizer.ggml.token_type", int)
    known = (
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == TokenType.CONTROL and text in END_OF_TURN
    )
    return list(dict.fromkeys(token for token in (*named, *known) if token is not None))


def _special_to(file: GgufFile, arch: str, config: dict[str, object], head_dim: int) -> dict[str, object]:
    if arch == "llama":
        return {"attention_bias": has_bias(file, ATTENTION), "mlp_bias": has_bias(file, MLP), "hidden_act": "silu"}
    if arch != "gemma3":
        return {"hidden_act": "silu"}
    layers, heads = file.needed("gemma3.block_count"), file.needed("gemma3.attention.head_count")
    hidden = file.needed("gemma3.embedding_length")
    return {
        "query_pre_attn_scalar": hidden // heads if layers == GEMMA3_27B_LAYERS else head_dim,
        "sliding_window": file.needed("gemma3.attention.sliding_window"),
        "sliding_window_pattern": _sliding_pattern(file),
        "rope_local_base_freq": _short(file.number("gemma3.rope.freq_base_swa") or 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _sliding_pattern(file: GgufFile) -> int:
    """Every how many layers one sees the whole context; GGUF has that number, a flag per layer, or nothing (6)."""
    key = "gemma3.attention.sliding_window_pattern"
    slides = [bool(flag) for flag in file.list_of(key, int)]
    if not slides:
        return file.integer(key) or 6
    pattern = slides.index(False) + 1 if False in slides else len(slides) + 1
    if slides != [(layer + 1) % pattern != 0 for layer in range(len(slides))]:
        raise ImportRefused("unsupported_architecture", "its sliding-window layers follow no regular pattern.")
    return pattern


def _head_dim(file: GgufFile, arch: str, hidden: int, heads: int) -> int:
    key = file.integer(f"{arch}.attention.key_length")
    value = file.integer(f"{arch}.attention.value_length")
    if key != value:
        raise ImportRefused("unsupported_architecture", f"keys of length {key} and values of length {value} are not supported.")
    head_dim = key or hidden // heads
    rotated = file.integer(f"{arch}.rope.dimension_count")
    if rotated is not None and rotated != head_dim:
        raise ImportRefused("unsupported_architecture", f"only {rotated} of {head_dim} dimensions per head are rotated.")
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensor("token_embd.weight")
    if embedding is None:
        raise ImportRefused("missing_tensor", "the GGUF has no token_embd.weight: it is not a whole language model.")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, arch: str, head_dim: int) -> dict[str, object] | None:
    factors = file.tensor("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(file, arch, factors, head_dim)
    kind = file.text(f"{arch}.rope.scaling.type")
    factor = file.number(f"{arch}.rope.scaling.factor")
    if factor is None or factor in (0.0, 1.0) or kind == "none":
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "type": "linear", "factor": _short(factor)}
    if kind == "yarn":
        original = file.needed(f"{arch}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "type": "yarn", "factor": _short(factor), "original_max_position_embeddings": original}
    raise ImportRefused("unsupported_architecture", f"rotary scaling of type {kind} cannot be imported.")


def _llama3_scaling(file: GgufFile, arch: str, tensor: GgufTensor, head_dim: int) -> dict[str, object] | None:
    """llama.cpp stores Llama 3's scaling as one divisor per frequency. The parameters are recovered and proven against it."""
    given = dequantize(tensor.data, tensor.kind).reshape(-1)
    factor = float(given.max())
    if factor == 1.0:
        return None
    theta = file.number(f"{arch}.rope.freq_base") or 10000.0
    for original in (8192, 4096, 2048, 16384, 32768, 131072):
        if np.allclose(given, llama3_factors(theta, head_dim, factor, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": _short(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ImportRefused("unsupported_architecture", "rope_freqs.weight follows no known rule for scaling rotary frequencies.")


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> list[float]:
    """The divisor of each rotary frequency, with Llama 3's usual low and high bounds of 1 and 4 turns per context."""
    low, high = 1.0, 4.0
    factors: list[float] = []
    for i in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _short(value: float) -> float:
    """9.999999747378752e-06, a float32 read as a double, is 1e-05."""
    return float(str(np.float32(value)))
