"""LoRA adapters in the catalog: where they are found, what they are called, and why one cannot be used."""

import json
import struct
from pathlib import Path

import pytest

from supervisor.catalog_edit import EditRefused, add_link, remove
from supervisor.paths import paths_of, prepare
from supervisor.roster import Roster, read_roster
from supervisor.settings import Settings
from supervisor.settings_load import SettingsInvalid, load
from tests.supervisor.model_dirs import model

LORA = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0}}
MODULE = "model.layers.0.self_attn.q_proj"


def tensors(path: Path, shapes: dict[str, list[int]]) -> Path:
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * at)
    return path


def adapter(path: Path, rows: int = 8, columns: int = 16, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(LORA | config))
    tensors(path / "adapters.safetensors", {f"{MODULE}.lora_a": [columns, 2], f"{MODULE}.lora_b": [2, rows]})
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    paths = paths_of(tmp_path, Settings())
    prepare(paths)
    tensors(model(paths.models / "org/base") / "model.safetensors", {f"{MODULE}.weight": [8, 16]})
    return tmp_path


def roster(home: Path, **models: object) -> Roster:
    (home / "settings.json").write_text(json.dumps({"models": models}))
    return read_roster(load({}, {}, home).settings, paths_of(home, Settings()), 1 << 34)


def of_base(home: Path, **own: object) -> Roster:
    return roster(home, **{"org/base": own})


def reason(found: Roster, name: str = "org/base+mine") -> str:
    entry = found.catalog.get(name)
    assert entry is not None and entry.files.problem is not None
    return entry.files.problem


def test_an_adapter_of_the_settings_is_a_model_with_the_base_and_its_own_bytes(home: Path, tmp_path: Path) -> None:
    found = of_base(home, adapters={"mine": str(adapter(tmp_path / "elsewhere"))})
    base, own = found.catalog.get("org/base"), found.catalog.get("org/base+mine")
    assert base is not None and own is not None
    assert (own.base, own.adapter, own.path, own.files.problem) == ("org/base", tmp_path / "elsewhere", base.path, None)
    assert own.files.weights_bytes == base.files.weights_bytes + 4 * (16 * 2 + 2 * 8)
    assert found.assignment(own, 1, "").model.adapter == str(tmp_path / "elsewhere")
    assert found.estimate_bytes(own) > found.estimate_bytes(base)


@pytest.mark.parametrize("trained_on", ["org/base", "another-org/base", "/somewhere/base/"])
def test_an_adapter_beside_the_models_belongs_to_the_one_it_was_trained_on(home: Path, trained_on: str) -> None:
    adapter(home / "models/mine", model=trained_on)
    assert roster(home).catalog.get("org/base+mine") is not None


def test_an_adapter_whose_base_is_not_here_or_not_told_is_passed_over_with_the_way_out(home: Path) -> None:
    adapter(home / "models/lost", model="org/other")
    adapter(home / "models/mute")
    reasons = {skipped.path.name: skipped.reason for skipped in roster(home).catalog.skipped}
    assert reasons["lost"] == "it is an adapter of org/other; say which: config set models.MODEL.adapters"
    assert reasons["mute"].startswith("it is an adapter that does not name its model")


def test_names_resolve_from_id_to_alias_to_profile_to_an_adapter_of_either(home: Path, tmp_path: Path) -> None:
    own = {"aliases": ["quick"], "profiles": {"cold": {"temperature": 0}}, "adapters": {"mine": str(adapter(tmp_path / "a"))}}
    found = of_base(home, **own)
    for name in ("org/base+mine", "quick+mine"):
        resolved = found.resolve(name)
        assert resolved is not None and (resolved.entry.id, resolved.profile) == ("org/base+mine", None)
    resolved = found.resolve("quick+mine:cold")
    assert resolved is not None and (resolved.entry.id, resolved.profile) == ("org/base+mine", "cold")
    assert found.resolve("quick+other") is None and found.resolve("+mine") is None


def test_an_adapter_takes_over_the_settings_of_its_base_but_for_its_own(home: Path, tmp_path: Path) -> None:
    base = {
        "context": 64,
        "temperature": 0.5,
        "pinned": True,
        "aliases": ["quick"],
        "adapters": {"m": str(adapter(tmp_path / "a"))},
    }
    found = roster(home, **{"org/base": base, "org/base+m": {"temperature": 0.1}})
    entry = found.catalog.get("org/base+m")
    assert entry is not None
    assert (found.context(entry), found.defaults(entry)["temperature"].value) == (64, 0.1)
    own = found.settings.of_model("org/base+m")
    assert (own.pinned, own.aliases) == (None, ())


def test_another_adapter_file_or_place_makes_a_worker_stale(home: Path, tmp_path: Path) -> None:
    def key(path: Path) -> str:
        found = of_base(home, adapters={"mine": str(path)})
        entry = found.catalog.get("org/base+mine")
        assert entry is not None
        return found.load_key(entry)

    one, other = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    before = key(one)
    assert key(other) != before == key(one)
    tensors(one / "adapters.safetensors", {f"{MODULE}.lora_a": [16, 4], f"{MODULE}.lora_b": [4, 8]})
    assert key(one) != before


def test_an_adapter_that_cannot_be_used_is_listed_with_the_reason(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = lambda: of_base(home, adapters={"mine": str(path)})  # noqa: E731
    assert "adapter_config.json" in reason(found())
    adapter(path, rows=9)
    fit = f"{MODULE}.lora_b of shape [2, 9] does not fit {MODULE}.weight of org/base, which is [8, 16]"
    assert fit in reason(found())
    (path / "adapters.safetensors").write_bytes(b"short")
    assert "adapters.safetensors cannot be read" in reason(found())
    (path / "adapters.safetensors").rename(path / "adapter_model.safetensors")
    assert "the format of another library" in reason(found())
    adapter(path, lora_parameters=None)
    assert "lacks num_layers or lora_parameters" in reason(found())


@pytest.mark.parametrize("adapters", [{"a+b": "/x"}, {"a:b": "/x"}, {" ": "/x"}, {"a": ""}, {"a": 3}, ["a"]])
def test_names_and_places_of_adapters_are_checked_with_their_key_path(home: Path, adapters: object) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        of_base(home, adapters=adapters)
    assert [problem.partition(":")[0] for problem in refused.value.problems] == ["models.org/base.adapters"]


def test_removing_an_adapter_leaves_its_base_alone(home: Path, tmp_path: Path) -> None:
    add_link(home / "models", adapter(tmp_path / "a", model="base"), "mine")
    entry = roster(home).catalog.get("org/base+mine")
    assert entry is not None
    remove(home / "models", entry.own_path)
    assert [e.id for e in roster(home).catalog.models] == ["org/base"]
    elsewhere = of_base(home, adapters={"mine": str(tmp_path / "a")}).catalog.get("org/base+mine")
    assert elsewhere is not None
    with pytest.raises(EditRefused):
        remove(home / "models", elsewhere.own_path)
