"""What the import makes of names, numbers and metadata, without a process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.numpy import load_file

from tests.stands.tiny_gguf import CHAT_TEMPLATE, HEAD_DIM, HEADS, HIDDEN, LAYERS, Recipe, write_gguf
from worker.blas import load_openblas
from worker.gguf import GgufFile, ImportRefused, open_gguf
from worker.gguf_config import generation_config, llama3_factors, model_config
from worker.gguf_names import CONFIG_TENSORS, plan_tensors, target_name
from worker.gguf_shards import weights_bytes, write_weights
from worker.gguf_tensors import Layout, choose_layout, convert
from worker.gguf_tokenizer import tokenizer_config

FLOAT32 = Layout("float32", {})


def opened(tmp_path: Path, recipe: Recipe) -> GgufFile:
    return open_gguf(write_gguf(tmp_path / "tiny.gguf", recipe))


def dequantized(file: GgufFile, name: str) -> np.ndarray:
    tensor = file.tensor(name)
    assert tensor is not None
    return quants.dequantize(tensor.data, tensor.kind).reshape(tensor.shape)


def written(tmp_path: Path, file: GgufFile, layout: Layout) -> dict[str, np.ndarray]:
    write_weights(tmp_path, plan_tensors(file), layout, progress=lambda _: None)
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("arch", list(LAYERS))
def test_every_tensor_becomes_exactly_one_parameter(arch: str, tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe(arch))
    weights = written(tmp_path, file, FLOAT32)
    assert len(weights) == len(file.tensors) == len({target_name(tensor.name, arch) for tensor in file.tensors})


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q6_K])
def test_every_quantization_is_read_as_gguf_dequantizes_it(kind: Kind, tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe("qwen3", kinds={"ffn_down": kind}))
    weights = written(tmp_path, file, FLOAT32)
    expected = dequantized(file, "blk.1.ffn_down.weight")
    np.testing.assert_array_equal(weights["model.layers.1.mlp.down_proj.weight"], expected)


def test_llama_heads_get_their_rotary_halves_back(tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe("llama"))
    weights = written(tmp_path, file, FLOAT32)
    ours = weights["model.layers.0.self_attn.q_proj.weight"].reshape(HEADS, 2, HEAD_DIM // 2, HIDDEN)
    theirs = dequantized(file, "blk.0.attn_q.weight").reshape(HEADS, HEAD_DIM // 2, 2, HIDDEN)
    np.testing.assert_array_equal(ours, theirs.swapaxes(1, 2))
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.v_proj.weight"], dequantized(file, "blk.0.attn_v.weight"))


def test_gemma_norms_lose_the_one_that_llama_cpp_added(tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe("gemma3"))
    weights = written(tmp_path, file, FLOAT32)
    for theirs, ours in {
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.pre_feedforward_layernorm.weight",
        "blk.0.post_attention_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    }.items():
        np.testing.assert_array_equal(weights[ours], dequantized(file, theirs) - 1)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_repacked_weights_are_the_dequantized_ones(kind: Kind, on_gpu: bool, tmp_path: Path) -> None:
    load_openblas()
    import mlx.core as mx

    file = opened(tmp_path, Recipe(kinds={"attn_q": kind, "ffn_up": kind}))
    layout = choose_layout(plan_tensors(file), "keep", on_gpu)
    bits = 8 if kind == Kind.Q8_0 else 4
    assert set(layout.packed_bits.values()) == {bits}
    assert layout.quantization() == {"group_size": 32, "bits": bits, "mode": "affine"}
    dense = {mapped.target: convert(mapped, FLOAT32)[0] for mapped in plan_tensors(file)}
    packed = written(tmp_path, file, layout)
    for target in layout.packed_bits:
        layer = target.removesuffix(".weight")
        arrays = [mx.array(packed[f"{layer}.{part}"]) for part in ("weight", "scales", "biases")]
        wide = [arrays[0], arrays[1].astype(mx.float32), arrays[2].astype(mx.float32)]
        values = np.array(mx.dequantize(*wide, group_size=32, bits=bits))
        np.testing.assert_allclose(values, dense[target], atol=1e-6)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_mixed_widths_are_named_per_layer(tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe(kinds={"attn_q": Kind.Q8_0, "ffn": Kind.Q4_0}))
    entry = model_config(file, choose_layout(plan_tensors(file), "keep", on_gpu=True))["quantization"]
    assert isinstance(entry, dict)
    assert entry["bits"] == 4
    assert entry["model.layers.0.self_attn.q_proj"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert "model.layers.0.mlp.up_proj" not in entry


def test_weights_of_one_float_type_keep_it(tmp_path: Path) -> None:
    file = opened(tmp_path, Recipe(kinds={"weight": Kind.BF16}))
    assert choose_layout(plan_tensors(file), "keep", on_gpu=True) == Layout("bfloat16", {})


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    load_openblas()
    import mlx.core as mx

    file = opened(tmp_path, Recipe())
    for mapped in plan_tensors(file):
        bits, wide = convert(mapped, Layout("bfloat16", {}))[0], convert(mapped, FLOAT32)[0]
        expected = np.array(mx.array(wide).astype(mx.bfloat16).view(mx.uint16))  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(bits, expected)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    big = np.full(HIDDEN, 1e6, dtype=np.float32)
    file = opened(tmp_path, Recipe(extra={"output_norm.weight": big}))
    with pytest.raises(ImportRefused, match="bfloat16") as caught:
        written(tmp_path, file, Layout("float16", {}))
    assert caught.value.code == "float16_overflow"


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    plan = plan_tensors(opened(tmp_path, Recipe()))
    write_weights(tmp_path, plan, FLOAT32, progress=lambda _: None, limit_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["metadata"]["total_size"] == weights_bytes(plan, FLOAT32)
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}


def test_llama_3_rotary_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(10000.0, HEAD_DIM, 32.0, 8192), dtype=np.float32)
    file = opened(tmp_path, Recipe(extra={"rope_freqs.weight": factors}))
    config = model_config(file, FLOAT32)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert len(plan_tensors(file)) == len(file.tensors) - len(CONFIG_TENSORS)


def test_unknown_rotary_factors_are_refused(tmp_path: Path) -> None:
    odd = np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(ImportRefused, match="rope_freqs"):
        model_config(opened(tmp_path, Recipe(extra={"rope_freqs.weight": odd})), FLOAT32)


def test_metadata_becomes_the_configuration(tmp_path: Path) -> None:
    recipe = Recipe("gemma3", integers={"tokenizer.ggml.eot_token_id": 5}, sampling_temperature=0.7)
    file = opened(tmp_path, recipe)
    config = model_config(file, FLOAT32)
    assert config["model_type"] == "gemma3_text"
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (8, 6)
    assert generation_config(file) == {"bos_token_id": 2, "eos_token_id": [1, 5], "temperature": 0.7}
    tokenizer = tokenizer_config(file)
    assert (tokenizer["bos_token"], tokenizer["eos_token"], tokenizer["unk_token"]) == ("<bos>", "<eos>", "<unk>")
    assert tokenizer["add_bos_token"] is True
    assert tokenizer["chat_template"] == CHAT_TEMPLATE
