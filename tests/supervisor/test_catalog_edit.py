"""Links and removals in the model directory: nothing outside it is ever touched."""

from pathlib import Path

import pytest

from supervisor.catalog_edit import EditRefused, add_link, remove


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def model_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "weights").mkdir()
    (path / "weights" / "a").write_text("x")
    return path


def test_a_link_is_made_where_the_catalog_looks(models: Path, tmp_path: Path) -> None:
    target = model_at(tmp_path / "elsewhere")
    assert add_link(models, target, "m").resolve() == target
    assert add_link(models, target, "org/m").resolve() == target


def test_a_taken_name_is_refused(models: Path, tmp_path: Path) -> None:
    target = model_at(tmp_path / "elsewhere")
    add_link(models, target, "m")
    with pytest.raises(EditRefused, match="already a model m"):
        add_link(models, target, "m")


@pytest.mark.parametrize("name", ["", "..", "../x", "/x", "a/b/c", ".hidden", "a/", "a/../b"])
def test_a_name_that_leads_out_or_hides_is_refused(models: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(EditRefused, match="cannot be a model's name"):
        add_link(models, model_at(tmp_path / "elsewhere"), name)


def test_a_name_inside_a_linked_model_is_refused(models: Path, tmp_path: Path) -> None:
    target = model_at(tmp_path / "elsewhere")
    add_link(models, target, "m")
    with pytest.raises(EditRefused, match="is a model itself"):
        add_link(models, target, "m/inner")
    assert not (target / "inner").exists()


def test_what_is_no_model_is_refused_with_what_to_do(models: Path, tmp_path: Path) -> None:
    empty, several, hub, gguf = (tmp_path / name for name in ("empty", "several", "hub", "gguf"))
    empty.mkdir()
    model_at(several / "a")
    (hub / "snapshots").mkdir(parents=True)
    gguf.mkdir()
    (gguf / "x.gguf").touch()
    for target, hint in ((empty, "no config.json"), (several, "--model-dir"), (hub, "--model-dir"), (gguf, "models import")):
        with pytest.raises(EditRefused, match=hint):
            add_link(models, target, "m")


def test_removing_a_link_leaves_the_model(models: Path, tmp_path: Path) -> None:
    target = model_at(tmp_path / "elsewhere")
    remove(models, add_link(models, target, "org/m"))
    assert (target / "weights" / "a").exists()
    assert list(models.iterdir()) == []


def test_removing_a_directory_deletes_it_also_when_parts_are_read_only(models: Path) -> None:
    path = model_at(models / "m")
    (path / "weights").chmod(0o500)
    remove(models, path)
    assert list(models.iterdir()) == []


def test_removing_one_model_of_an_organisation_keeps_the_other(models: Path) -> None:
    first, second = model_at(models / "org" / "a"), model_at(models / "org" / "b")
    remove(models, first)
    assert not first.exists() and second.exists()


def test_a_removal_cut_short_leaves_no_model_under_its_name(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_at(models / "m")

    def die(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove(models, path)
    assert [p for p in models.iterdir() if not p.name.startswith(".")] == []


def test_a_hub_download_goes_with_its_blobs(models: Path) -> None:
    snapshot = model_at(models / "models--org--m" / "snapshots" / "abc")
    (models / "models--org--m" / "blobs").mkdir()
    remove(models, snapshot)
    assert list(models.iterdir()) == []


def test_nothing_outside_the_model_directory_is_removed(models: Path, tmp_path: Path) -> None:
    outside = model_at(tmp_path / "outside")
    (models / "org").symlink_to(tmp_path)
    for path in (outside, models / ".." / "outside", models / "org" / "outside", models):
        with pytest.raises(EditRefused, match="outside"):
            remove(models, path)
    assert (outside / "config.json").exists()
