"""What a model directory says of itself, and what is said of one that is damaged."""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.catalog import scan
from supervisor.model_files import Damaged, NotAModel, _shard, read_model
from tests.supervisor.model_dirs import CONFIG, model, shard


def test_the_facts_of_a_plain_model(tmp_path: Path) -> None:
    files = read_model(model(tmp_path))
    assert (files.context, files.problem) == (512, None)
    assert files.weights_bytes == 4000
    assert files.kv_bytes_per_token == 2 * 2 * 16 * 2 * 2  # layers, KV heads, head size, K and V, bytes of bfloat16


def test_weights_of_several_shards_and_kinds_are_summed_and_kv_takes_the_commonest_float(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shard(tmp_path / "model-00001-of-00002.safetensors", {"a": ("U32", 10_000), "b": ("F32", 400)})
    shard(tmp_path / "model-00002-of-00002.safetensors", {"c": ("F16", 200)})
    files = read_model(tmp_path)
    assert files.weights_bytes == 10_600
    assert files.kv_bytes_per_token == 2 * 2 * 16 * 2 * 4


def test_facts_nested_in_text_config_are_found(tmp_path: Path) -> None:
    text = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    outer: dict[str, object] = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**text, "max_position_embeddings": 8192, "head_dim": 32},
    }
    files = read_model(model(tmp_path, outer))
    assert files.context == 8192
    assert files.kv_bytes_per_token == 2 * 2 * 32 * 2 * 2


def test_a_context_that_is_not_named_is_assumed(tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "max_position_embeddings"}
    assert read_model(model(tmp_path, config)).context == 4096
    assert read_model(model(tmp_path, config, n_positions=1024)).context == 1024


@pytest.mark.parametrize("cut", [1, 3999, 4000])
def test_a_truncated_shard_is_a_problem_that_names_it(tmp_path: Path, cut: int) -> None:
    model(tmp_path)
    shard(tmp_path / "model.safetensors", {"w": ("BF16", 4000)}, cut=cut)
    problem = read_model(tmp_path).problem
    assert problem is not None and "model.safetensors is cut short" in problem


def test_a_shard_cut_in_its_header_is_a_problem(tmp_path: Path) -> None:
    model(tmp_path)
    for content in (b"", b"\x08\0\0", (tmp_path / "model.safetensors").read_bytes()[:20]):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in (read_model(tmp_path).problem or "")


def test_a_missing_shard_of_an_index_is_a_problem_that_names_it(tmp_path: Path) -> None:
    model(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = read_model(tmp_path).problem
    assert problem == "1 of its weight files are missing: model-00002-of-00002.safetensors"


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": 3}', "{}", "[" * 100_000])
def test_an_index_that_makes_no_sense_is_a_problem(tmp_path: Path, index: str) -> None:
    model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "index.json cannot be read" in (read_model(tmp_path).problem or "")


def test_a_link_to_weights_that_are_not_there_is_a_problem(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert "model.safetensors cannot be read" in (read_model(tmp_path).problem or "")


def test_a_model_without_a_tokenizer_is_a_problem(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "no tokenizer" in (read_model(tmp_path).problem or "")


def test_weights_that_are_not_loaded_are_not_counted(tmp_path: Path) -> None:
    model(tmp_path)
    shard(tmp_path / "consolidated.safetensors", {"w": ("BF16", 4000)})
    (tmp_path / "._model.safetensors").write_bytes(b"\0\x05\x16\x07 written by a Mac on a foreign disk")
    files = read_model(tmp_path)
    assert (files.weights_bytes, files.problem) == (4000, None)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "no model_type"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ("[" * 100_000, "cannot be read"),
        ("\udcff", "cannot be read"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "BertForMaskedLM is not a text generation model"),
    ],
)
def test_a_config_of_something_else_says_why(tmp_path: Path, config: str, reason: str) -> None:
    model(tmp_path)
    (tmp_path / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    with pytest.raises(NotAModel, match=reason):
        read_model(tmp_path)


@pytest.mark.parametrize("architectures", [None, 7, "LlamaForCausalLM", [], {}, [None, "XForCausalLM"]])
def test_architectures_of_any_shape_are_survived(tmp_path: Path, architectures: object) -> None:
    assert read_model(model(tmp_path, architectures=architectures)).problem is None


def test_a_directory_without_weights_is_no_model(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(NotAModel, match=r"no \.safetensors"):
        read_model(tmp_path)


def test_sampling_defaults_are_taken_under_our_names(tmp_path: Path) -> None:
    model(tmp_path)
    given = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 2048, "do_sample": True, "top_p": True, "min_p": "x", "n": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert read_model(tmp_path).generation == {"temperature": 0.6, "top_k": 20, "max_tokens": 2048}


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.9, "do_sample": false}')
    assert read_model(tmp_path).generation["temperature"] == 0.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"temperature": NaN}', "[" * 100_000])
def test_sampling_defaults_that_make_no_sense_are_as_if_not_there(tmp_path: Path, content: str) -> None:
    model(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    assert read_model(tmp_path).generation == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
HEADERS = JSON | st.dictionaries(
    st.text(max_size=3),
    st.fixed_dictionaries({"data_offsets": JSON | st.lists(st.integers(-9, 99), max_size=3), "dtype": JSON}),
)


@given(HEADERS, st.binary(max_size=40))
def test_no_header_makes_it_raise_anything_but_damage(
    tmp_path_factory: pytest.TempPathFactory, header: object, body: bytes
) -> None:
    text = json.dumps(header).encode()
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    with contextlib.suppress(Damaged):
        assert all(size >= 0 for size in _shard(path).values())


@given(st.binary(max_size=100))
def test_no_bytes_make_it_raise_anything_but_damage(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(Damaged):
        _shard(path)


def test_sizes_that_fit_no_message_are_a_problem_of_that_model_alone(tmp_path: Path) -> None:
    """Products of them would make the status of the whole server unsendable."""
    files = read_model(model(tmp_path, max_position_embeddings=10**30, num_hidden_layers=10**25))
    assert files.problem is not None and "sizes that no model has" in files.problem
    assert max(files.context, files.kv_bytes_per_token) <= 2**40


def test_defaults_that_no_request_could_ask_for_are_passed_over(tmp_path: Path) -> None:
    model(tmp_path)
    given = {"temperature": -1, "top_p": 5, "top_k": 2.5, "min_p": 7, "max_new_tokens": 10**30, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert read_model(tmp_path).generation == {"repetition_penalty": 1.1}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json"])
def test_a_pipe_in_a_models_directory_is_not_read(tmp_path: Path, name: str) -> None:
    """Nobody writes into it: the server would not get past its start."""
    model(tmp_path / "m")
    (tmp_path / "m" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "m" / name)
    found = scan([tmp_path])
    assert len(found.models) + len(found.skipped) == 1


def test_an_endless_offset_is_damage(tmp_path: Path) -> None:
    model(tmp_path)
    text = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, float("inf")]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "OverflowError" in (read_model(tmp_path).problem or "")
