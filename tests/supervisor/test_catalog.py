"""Which models are found, under which names, and what is said of everything that was passed over."""

import json
import os
import sys
from pathlib import Path

import pytest

from supervisor.adapters import with_adapters
from supervisor.catalog import ADAPTER_CONFIG, Catalog, scan
from supervisor.settings import Settings
from tests.supervisor.model_dirs import model


def ids(catalog: Catalog) -> list[str]:
    return [entry.id for entry in catalog.models]


def reasons(catalog: Catalog) -> dict[str, str]:
    return {skipped.path.name: skipped.reason for skipped in catalog.skipped}


def test_the_three_layouts_and_a_directory_that_is_a_model_itself(tmp_path: Path) -> None:
    model(tmp_path / "a" / "flat")
    model(tmp_path / "a" / "org" / "one")
    model(tmp_path / "a" / "org" / "two")
    model(tmp_path / "a" / "models--mlx-community--Qwen3-4B--x" / "snapshots" / "abc")
    model(tmp_path / "itself")
    catalog = scan([tmp_path / "a", tmp_path / "itself"])
    assert ids(catalog) == ["flat", "itself", "mlx-community/Qwen3-4B--x", "org/one", "org/two"]
    assert catalog.skipped == ()
    entry = catalog.get("org/two")
    assert entry is not None and entry.path == tmp_path / "a" / "org" / "two"
    assert catalog.get("org") is None


def test_the_snapshot_of_a_hub_download_is_the_one_that_main_names(tmp_path: Path) -> None:
    repo = tmp_path / "models--o--m"
    for number, revision in enumerate(("aaa", "bbb", "ccc")):
        os.utime(model(repo / "snapshots" / revision), (1000 + number, 1000 + number))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("bbb\n")
    assert scan([tmp_path]).models[0].path.name == "bbb"
    (repo / "refs" / "main").write_text("not-downloaded")
    assert scan([tmp_path]).models[0].path.name == "ccc"
    (repo / "refs" / "main").unlink()
    assert scan([tmp_path]).models[0].path.name == "ccc"


def test_a_hub_download_of_nothing_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "models--o--m" / "refs").mkdir(parents=True)
    (tmp_path / "models--o--n" / "snapshots").mkdir(parents=True)
    assert reasons(scan([tmp_path])) == dict.fromkeys(("models--o--m", "models--o--n"), "its download has no snapshot")


def test_other_downloads_of_the_hub_are_no_matter_and_gguf_files_are_found_where_lm_studio_puts_them(tmp_path: Path) -> None:
    model(tmp_path / "hub" / "models--o--m" / "snapshots" / "abc")
    (tmp_path / "hub" / "datasets--squad" / "snapshots").mkdir(parents=True)
    file = tmp_path / "studio" / "org" / "Some-GGUF" / "some.Q4_0.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    catalog = scan([tmp_path / "hub", tmp_path / "studio"])
    assert ids(catalog) == ["o/m"]
    assert reasons(catalog) == {"org": f"a GGUF file has to be converted: omlxctl models import {file}"}


def test_a_model_that_is_registered_and_in_a_directory_that_is_served_is_one_model(tmp_path: Path) -> None:
    there = model(tmp_path / "all" / "m")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "m").symlink_to(there)
    catalog = scan([tmp_path / "own", tmp_path / "all"])
    assert ids(catalog) == ["m"] and catalog.skipped == ()


def test_the_first_of_two_models_with_one_name_wins_and_the_other_is_named(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a" / "m", hidden_size=64), model(tmp_path / "b" / "m", hidden_size=128)
    catalog = scan([tmp_path / "a", tmp_path / "b"])
    assert [entry.path for entry in catalog.models] == [first]
    [skipped] = catalog.skipped
    assert skipped.path == second and str(first) in skipped.reason


def test_hidden_directories_are_not_looked_at(tmp_path: Path) -> None:
    model(tmp_path / ".importing-m-123")
    model(tmp_path / "org" / ".cache")
    assert scan([tmp_path]).models == ()


def test_what_is_no_model_is_passed_over_with_a_reason_each(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    model(tmp_path / "embedder", architectures=["BertModel"])
    model(tmp_path / "qwen:7b")
    (model(tmp_path / "no-weights") / "model.safetensors").unlink()
    catalog = scan([tmp_path, tmp_path / "missing"])
    assert catalog.models == ()
    why = reasons(catalog)
    assert set(why) == {"empty", "m.gguf", "dangling", "embedder", "qwen:7b", "no-weights", "missing"}
    assert "no config.json" in why["empty"]
    assert f"omlxctl models import {tmp_path / 'm.gguf'}" in why["m.gguf"]
    assert "not a text generation model" in why["embedder"]
    assert "no .safetensors" in why["no-weights"]
    assert why["missing"] == "there is no such directory"


def test_names_that_mean_something_else_or_break_lines_are_passed_over(tmp_path: Path) -> None:
    for name in ("gateway", "omlxd", "two\nlines", "a:b"):
        model(tmp_path / name)
    catalog = scan([tmp_path])
    assert ids(catalog) == []
    found = reasons(catalog)
    assert "own processes" in found["gateway"] and "own processes" in found["omlxd"]
    assert "control characters" in found["two\nlines"]
    assert "colon" in found["a:b"]


def test_a_damaged_model_is_listed_with_its_problem_so_that_its_name_is_known(tmp_path: Path) -> None:
    path = model(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    [entry] = scan([tmp_path]).models
    assert entry.id == "m" and "cut short" in (entry.files.problem or "")


@pytest.mark.skipif(os.getuid() == 0, reason="root may enter every directory")
def test_a_directory_that_may_not_be_entered_hides_nothing_else(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "locked").mkdir(mode=0)
    try:
        catalog = scan([tmp_path])
    finally:
        (tmp_path / "locked").chmod(0o700)
    assert ids(catalog) == ["m"] and "locked" in reasons(catalog)


def test_an_error_of_the_disk_in_one_directory_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "bad", "c"):
        model(tmp_path / name)
    whole = Path.is_dir

    def failing(path: Path) -> bool:
        if path.name == "bad":
            raise OSError(5, "Input/output error")
        return whole(path)

    monkeypatch.setattr(Path, "is_dir", failing)
    catalog = scan([tmp_path])
    assert ids(catalog) == ["a", "c"]
    assert reasons(catalog) == {"bad": "it cannot be read: Input/output error"}


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "up").symlink_to(tmp_path)
    model(tmp_path / "m")
    assert "m" in ids(scan([tmp_path]))


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_directory_whose_name_is_no_utf8_is_passed_over_and_can_be_told(tmp_path: Path) -> None:
    model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")))
    [skipped] = scan([tmp_path]).skipped
    assert skipped.shown.encode().endswith("/\ufffd\ufffd".encode())


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_whatever_names_and_files_hold_what_is_said_of_them_fits_a_message(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff")
    (tmp_path / f"{odd}g").mkdir()
    for gguf in (f"{odd}g/a.gguf", f"{odd}.gguf"):
        (tmp_path / gguf).write_bytes(b"")
    model(tmp_path / "named", architectures=["\ud800"])
    model(tmp_path / "sharded")
    (tmp_path / "sharded" / f"model-{odd}.safetensors").write_bytes(b"")
    model(tmp_path / "indexed")
    (tmp_path / "indexed" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "\ud800"}}))
    model(tmp_path / "models--o--n" / "snapshots" / odd)
    (tmp_path / "models--o--n" / "refs").mkdir()
    (tmp_path / "models--o--n" / "refs" / "main").write_bytes(b"\xff")
    for name, base in ((f"style{odd}", "sharded"), ("style", "\ud800")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ADAPTER_CONFIG).write_text(json.dumps({"model": base}))
    found = with_adapters(scan([tmp_path]), Settings())
    assert ids(found) == ["indexed", "sharded"]
    assert len(found.skipped) == 6
    for said in [f"{entry.path} {entry.files.problem}" for entry in found.models] + [
        f"{s.shown} {s.reason}" for s in found.skipped
    ]:
        said.encode()
