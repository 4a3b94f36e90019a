"""The import process from outside: what it writes, what it refuses and with which words, and what is left when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.stands.models import import_gguf, smollm2_gguf
from tests.stands.tiny_gguf import CHAT_TEMPLATE, HIDDEN, Recipe, write_gguf
from worker.gguf_staging import Staging

REFUSED = 65


def start(source: Path, models: Path, name: str, *more: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "worker.gguf_import", "--source", str(source), "--models-dir", str(models)]
    command += ["--name", name, "--dtype", "float32", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, pass_fds=pass_fds)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def refusal(source: Path, models: Path, name: str = "m") -> tuple[str, str]:
    process = start(source, models, name)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == REFUSED, out
    error = json.loads(out.splitlines()[-1])["error"]
    assert not models.exists() or not [entry for entry in models.iterdir() if entry.name.startswith(".")]
    return error["code"], error["message"]


def test_an_import_reports_its_stages_and_writes_a_whole_model(tmp_path: Path) -> None:
    messages = import_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "models", "tiny", "auto")
    stages = list(dict.fromkeys(message["stage"] for message in messages))
    assert stages == ["read", "tokenizer", "tensors", "write", "check", "done"]
    last, tensors = messages[-1], [message for message in messages if message["stage"] == "tensors"]
    assert last["path"] == str(tmp_path / "models" / "tiny")
    assert last["sample"]
    assert tensors[-1]["done"] == tensors[-1]["total"] == len(tensors)
    assert names(tmp_path / "models") == ["tiny"]
    assert names(tmp_path / "models" / "tiny") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_chat_templates_beside_the_default_one_are_kept(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(tool_template="{{ tools }}"))
    import_gguf(source, tmp_path / "models", "tiny", "float32")
    tiny = tmp_path / "models" / "tiny"
    assert json.loads((tiny / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    assert (tiny / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_a_complete_split_is_one_model_whichever_part_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", Recipe(split_max_tensors=8))
    last = max(tmp_path.glob("tiny-*-of-*.gguf"))
    assert first != last
    import_gguf(last, tmp_path / "models", "split", "float32")
    import_gguf(write_gguf(tmp_path / "whole.gguf"), tmp_path / "models", "whole", "float32")
    weights = [(tmp_path / "models" / name / "model.safetensors").read_bytes() for name in ("split", "whole")]
    assert weights[0] == weights[1]


def test_a_split_with_a_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", Recipe(split_max_tensors=8))
    gone = max(tmp_path.glob("tiny-*-of-*.gguf"))
    gone.unlink()
    code, message = refusal(first, tmp_path / "models")
    assert code == "incomplete_split"
    assert gone.name in message


@pytest.mark.parametrize("share", [0.002, 0.02, 0.5, 0.999])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    os.truncate(source, int(source.stat().st_size * share))
    code, message = refusal(source, tmp_path / "models")
    assert code == "damaged_gguf"
    assert "cut short" in message


def test_the_real_file_cut_in_half_is_refused(tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    whole = smollm2_gguf()
    with whole.open("rb") as file:
        half.write_bytes(file.read(whole.stat().st_size // 2))
    assert refusal(half, tmp_path / "models")[0] == "damaged_gguf"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert refusal(tmp_path / "x.gguf", tmp_path / "models")[0] == "not_gguf"
    assert refusal(tmp_path / "absent.gguf", tmp_path / "models")[0] == "unreadable"


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(declared_arch="mamba"))
    code, message = refusal(source, tmp_path / "models")
    assert code == "unsupported_architecture"
    assert "mamba" in message
    assert "gemma3, llama, qwen2, qwen3" in message


def vector() -> np.ndarray:
    return np.ones(HIDDEN, dtype=np.float32)


@pytest.mark.parametrize(
    ("recipe", "code", "named"),
    [
        (Recipe(extra={"blk.0.attn_sinks.weight": vector()}), "unmapped_tensor", "blk.0.attn_sinks.weight"),
        (Recipe(extra={"blk.7.attn_norm.weight": vector()}), "unmapped_tensor", "blk.7.attn_norm.weight"),
        (Recipe(extra={"blk.00.attn_norm.weight": vector()}), "doubly_mapped_tensor", "blk.00.attn_norm.weight"),
        (Recipe(skip=frozenset({"blk.1.ffn_up.weight"})), "missing_tensor", "model.layers.1.mlp.up_proj.weight"),
        (Recipe(pre="poro-chat"), "unsupported_tokenizer", "poro-chat"),
        (Recipe(integers={"llama.expert_count": 8}), "unsupported_architecture", "mixture of experts"),
        (Recipe(extra={"output_norm.weight": vector() * np.float32(np.nan)}), "check_failed", "NaN"),
        (Recipe(extra={"output_norm.weight": np.ones(7, dtype=np.float32)}), "check_failed", "does not load"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(recipe: Recipe, code: str, named: str, tmp_path: Path) -> None:
    got, message = refusal(write_gguf(tmp_path / "tiny.gguf", recipe), tmp_path / "models")
    assert got == code
    assert named in message


def test_a_taken_name_is_refused_and_the_model_there_untouched(tmp_path: Path) -> None:
    taken = tmp_path / "models" / "m"
    taken.mkdir(parents=True)
    (taken / "config.json").write_text("{}")
    assert refusal(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "models")[0] == "name_taken"
    assert (taken / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "", "-x"])
def test_a_name_that_is_no_plain_directory_name_is_refused(name: str, tmp_path: Path) -> None:
    process = start(tmp_path / "absent.gguf", tmp_path / "models", "placeholder", f"--name={name}")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == REFUSED
    assert json.loads(out)["error"]["code"] == "bad_name"


def test_an_unwritable_models_directory_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    process = start(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "models", "m")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(out)["error"]["code"] == "io_error"


@pytest.fixture
def halfway(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """SmolLM2's import while it writes tensors, its models directory, and the supervisor's end of its lifeline."""
    models = tmp_path / "models"
    read_end, write_end = os.pipe()
    process = start(smollm2_gguf(), models, "smol", "--lifeline-fd", str(read_end), pass_fds=(read_end,))
    os.close(read_end)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("stage") == "tensors":
            break
    assert names(models) == [f".importing-smol-{process.pid}"]
    yield process, models, write_end
    process.kill()
    process.wait()


def test_a_killed_import_leaves_nothing_visible_and_the_next_one_cleans_up(
    halfway: tuple[subprocess.Popen[str], Path, int], tmp_path: Path
) -> None:
    process, models, write_end = halfway
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    os.close(write_end)
    assert names(models) == [f".importing-smol-{process.pid}"]
    import_gguf(write_gguf(tmp_path / "tiny.gguf"), models, "tiny", "float32")
    assert names(models) == ["tiny"]


def test_a_terminated_import_removes_what_it_wrote(halfway: tuple[subprocess.Popen[str], Path, int]) -> None:
    process, models, write_end = halfway
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    os.close(write_end)
    assert names(models) == []


def test_an_import_ends_with_its_supervisor(halfway: tuple[subprocess.Popen[str], Path, int]) -> None:
    process, models, write_end = halfway
    os.close(write_end)
    process.wait(timeout=60)
    assert names(models) == []


def test_a_living_import_is_not_mistaken_for_a_leftover(tmp_path: Path) -> None:
    with Staging(tmp_path, "one") as one, Staging(tmp_path, "two") as two:
        assert one.path.exists()
        assert two.path.exists()
    assert names(tmp_path) == []


def test_a_leftover_that_goes_while_one_looks_at_it_is_nobodys_failure(tmp_path: Path) -> None:
    (tmp_path / ".importing-other-1").symlink_to("gone already")
    with Staging(tmp_path, "one") as one:
        assert one.path.exists()


def test_two_imports_of_one_name_end_in_one_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    both = [start(source, tmp_path / "models", "m") for _ in range(2)]
    outs = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, REFUSED], outs
    assert names(tmp_path / "models") == ["m"]
