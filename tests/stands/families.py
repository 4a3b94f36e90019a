"""Tiny random models of each cache family that mlx_lm knows.

A family test proves nothing on a model that forgets: state decays slowly here (A_log −5), windows are smaller than the prompts,
and experts are float32, as others cannot be computed on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from tests.stands.models import tiny_model

WINDOW = 48
SLOW_DECAY = -5.0

_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "default"},
    },
    "qwen3_next": _MOE | _DELTA,
    "qwen3_5": _DELTA | {"rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_expand": 1,
        "tie_word_embeddings": False,
        "lm_head_multiplier": 1.0,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, float("inf")],
        "time_step_rank": "auto",
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "deepseek_v32": {
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 64,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
    },
    "llama4": {
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 128,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
}
UNCACHED: dict[str, dict[str, object]] = {
    "deepseek_v41": {
        "q_lora_rank": 32,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "compress_ratios": [1, 4],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
}
"""Its caches are of a class of its own."""
WINDOWED = ("gemma3_text", "gpt_oss", "recurrent_gemma", "llama4")
STATEFUL = ("qwen3_next", "qwen3_5", "falcon_h1", "mamba2", "lfm2", "recurrent_gemma")


def family_model(path: Path, family: str, **overrides: object) -> Path:
    """The family's tiny model, written to `path`."""
    config = (FAMILIES | UNCACHED)[family] | overrides
    if family == "llama4":  # the text model's part of a larger config
        flat = tiny_model(path.with_name(f"{path.name}-flat"))
        config = {"text_config": json.loads((flat / "config.json").read_text()) | config}
    model = tiny_model(path, family, **config)
    _make_it_remember(model, family)
    return model


def _make_it_remember(model: Path, family: str) -> None:
    """State that decays slowly, and for falcon_h1, whose multipliers leave little of it, attention that matters."""
    import mlx.core as mx

    file = model / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    changed = {name: mx.full(weights[name].shape, SLOW_DECAY) for name in weights if name.endswith("A_log")}
    if family == "falcon_h1":
        loud = [name for name in weights if "self_attn" in name and name.endswith(("q_proj.weight", "o_proj.weight"))]
        changed |= {name: weights[name] * 4 for name in loud}
    if changed:
        mx.eval(weights, changed)
        mx.save_safetensors(str(file), weights | changed, metadata={"format": "mlx"})
