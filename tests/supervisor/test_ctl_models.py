"""omlxctl load, unload, reset and models …, with a server and without one."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.ctl_stand import SLOT, ScriptedSupervisor, Shell, plain_dict


def write_model(path: Path, generation: dict[str, object] | None = None) -> Path:
    """As much of a model directory as the catalog looks at."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 777}))
    (path / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


# With a server


def test_load_shows_each_stage_and_then_the_pid(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers(
        "load",
        {"state": "queued", "stage": None},
        {"state": "loading", "stage": "weights", "done": 1, "total": 2},
        {"state": "loading", "stage": "warm", "done": 0, "total": 0},
        {"model": "tiny", "pid": 41, "load_s": 1.25},
    )
    ran = shell("load", "tiny", "--pin")
    assert ran.err.splitlines() == ["loading tiny: waiting for memory", "loading tiny: weights", "loading tiny: warm"]
    assert ran.out == "tiny is loaded (pid 41, 1.2 s)\n"
    assert server.calls == [("load", {"model": "tiny", "pin": True})]
    assert json.loads(shell("load", "tiny", "--json").out)["pid"] == 41


def test_unload_and_reset_name_the_model(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("unload", {})
    server.answers("reset", {})
    assert shell("unload", "tiny", "--force").status == 0
    assert shell("reset", "tiny").status == 0
    assert server.calls == [("unload", {"model": "tiny", "force": True}), ("reset", {"model": "tiny"})]


@pytest.mark.parametrize(
    "words", [("load", "m"), ("unload", "m"), ("reset", "m"), ("ps",), ("reload",), ("stop",), ("logs", "m", "-f")]
)
def test_what_needs_a_server_says_so(shell: Shell, words: tuple[str, ...]) -> None:
    ran = shell(*words)
    assert (ran.status, "omlxctl serve" in ran.err) == (3, True)


def test_models_lists_what_the_server_knows(shell: Shell, server: ScriptedSupervisor) -> None:
    broken = plain_dict(SLOT) | {"id": "broken", "usable": False, "problem": "model.safetensors is cut short"}
    skipped = {"path": "/m/junk", "reason": "it has no config.json"}
    server.answers("models", {"models": [plain_dict(SLOT), broken], "skipped": [skipped], "dirs": ["/m"]})
    ran = shell("models")
    assert "tiny" in ran.out and "3.0 MiB" in ran.out and "unusable" in ran.out
    assert "broken: model.safetensors is cut short" in ran.err
    assert "passed over /m/junk: it has no config.json" in ran.err
    assert json.loads(shell("models", "--json").out)["skipped"] == [skipped]


def test_show_prints_defaults_with_their_sources(shell: Shell, server: ScriptedSupervisor) -> None:
    defaults = {"temperature": {"value": 0.2, "source": "model settings"}, "min_p": {"value": None, "source": ""}}
    told = {"capabilities": {"self_check": {"decode_s": 0.02, "decode_ratio": 1.25}}}
    server.answers("model", plain_dict(SLOT) | {"slow": "there is no fan"} | {"defaults": defaults, **told})
    ran = shell("models", "show", "tiny")
    assert "temperature  0.2    model settings" in ran.out
    assert "min_p" not in ran.out
    assert "20.0 ms per token when it was loaded, 1.2 times what reading its weights takes" in ran.out
    assert "slow     there is no fan" in ran.out
    assert json.loads(shell("models", "show", "tiny", "--json").out)["defaults"] == defaults


def test_import_by_the_server_shows_progress_and_the_result(shell: Shell, server: ScriptedSupervisor, tmp_path: Path) -> None:
    file = tmp_path / "My-Model.gguf"
    file.write_bytes(b"GGUF")
    server.answers(
        "import",
        {"stage": "tensors", "done": 1, "total": 2},
        {"path": "/h/models/My-Model", "dtype": "float32", "bytes": 1 << 30, "sample": "hi", "model": "My-Model"},
    )
    ran = shell("models", "import", str(file))
    assert "importing My-Model: tensors" in ran.err
    assert "My-Model is imported: 1.0 GiB as float32" in ran.out
    assert server.calls == [("import", {"file": str(file), "name": "My-Model", "dtype": "auto"})]


def test_rm_asks_first_and_needs_yes_without_a_terminal(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("model", plain_dict(SLOT))
    ran = shell("models", "rm", "tiny")
    assert (ran.status, "--yes" in ran.err) == (2, True)
    server.answers("remove", {})
    assert shell("models", "rm", "tiny", "--yes").status == 0
    assert server.calls[-1] == ("remove", {"model": "tiny"})


def test_add_makes_a_link_and_tells_the_server(shell: Shell, server: ScriptedSupervisor, home: Path, tmp_path: Path) -> None:
    server.answers("rescan", {"added": ["m"], "removed": []})
    assert shell("models", "add", str(write_model(tmp_path / "m"))).status == 0
    assert (home / "models" / "m").is_symlink()
    assert server.calls == [("rescan", {})]


# Without one


def test_a_model_is_added_listed_shown_and_removed_without_a_server(shell: Shell, home: Path, tmp_path: Path) -> None:
    target = write_model(tmp_path / "m", {"temperature": 0.5})
    (home / "settings.json").write_text('{"models": {"org/m": {"top_k": 7}}}')
    assert shell("models", "add", str(target), "--name", "org/m").out == "org/m is registered\n"
    listed = json.loads(shell("models", "--json").out)
    assert [(m["id"], m["context"], m["weights_bytes"]) for m in listed["models"]] == [("org/m", 777, 8)]
    assert listed["dirs"] == [str(home / "models")]
    shown = shell("models", "show", "org/m").out
    assert "generation_config.json" in shown and "model settings" in shown and "server settings" in shown
    assert shell("models", "rm", "org/m", "--yes").status == 0
    assert target.is_dir() and not (home / "models" / "org").exists()
    assert "omlxctl models import" in shell("models").out


def test_models_in_the_directories_of_the_settings_are_found_but_never_removed(shell: Shell, tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    shell.patch.setenv("OMLX_MODEL_DIR", str(tmp_path))
    assert "m " in shell("models").out
    ran = shell("models", "rm", "m", "--yes")
    assert (ran.status, "remove it yourself" in ran.err) == (5, True)
    assert (tmp_path / "m" / "config.json").exists()


@pytest.mark.parametrize("words", [("show", "x"), ("rm", "x", "--yes"), ("rm", "x")])
def test_a_model_that_is_not_there_is_not_found(shell: Shell, words: tuple[str, ...]) -> None:
    assert shell("models", *words).status == 4


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(shell: Shell, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"not a gguf at all")
    ran = shell("models", "import", str(file))
    assert (ran.status, "not a GGUF" in ran.err) == (5, True)
    assert list((home / "models").iterdir()) == []


def test_an_import_process_that_dies_is_reported_with_its_last_lines(shell: Shell, tmp_path: Path) -> None:
    program = "import sys; print('{\"stage\": \"read\"}', flush=True); print('out of cheese', file=sys.stderr); sys.exit(9)"
    real = subprocess.Popen
    shell.patch.setattr(subprocess, "Popen", lambda _, **how: real([sys.executable, "-c", program], **how))
    file = tmp_path / "x.gguf"
    file.touch()
    ran = shell("models", "import", str(file))
    assert (ran.status, "status 9" in ran.err, "out of cheese" in ran.err) == (1, True, True)


def test_import_of_a_missing_file_is_a_usage_error(shell: Shell) -> None:
    assert shell("models", "import", "/nowhere/x.gguf").status == 2
