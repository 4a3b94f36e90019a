"""Optional features of a load: which settings make sense together, and what they do to the memory that is reserved."""

import json
from pathlib import Path

import pytest

from supervisor.load_options import KvQuantizing, LoadOptions
from supervisor.model_files import ModelFiles
from supervisor.settings_load import SettingsInvalid, load

FILES = ModelFiles(context=32_768, weights_bytes=1000, kv_bytes_per_token=400, kv_element_bytes=2, created=0, changed="")


def problems(home: Path, models: object) -> list[str]:
    (home / "settings.json").write_text(json.dumps({"models": models}))
    try:
        load({}, {}, home)
    except SettingsInvalid as e:
        return e.problems
    return []


@pytest.mark.parametrize(("name", "value"), [("kv_group_size", 32), ("quantized_kv_start", 100)])
def test_what_only_changes_kv_bits_needs_kv_bits(tmp_path: Path, name: str, value: int) -> None:
    complaint = f"models.m.{name}: it means nothing without models.m.kv_bits"
    assert problems(tmp_path, {"m": {name: value}}) == [complaint]
    assert problems(tmp_path, {"m": {name: value, "kv_bits": 4}}) == []
    assert problems(tmp_path, {"m": {"kv_bits": 4}, "m+style": {name: value}}) == [], "an adapter has its base's bits"


@pytest.mark.parametrize(("name", "value"), [("kv_bits", 3), ("kv_bits", True), ("kv_bits", "8.0"), ("kv_group_size", 16)])
def test_sizes_that_mlx_does_not_know_are_refused_with_their_key_path(tmp_path: Path, name: str, value: object) -> None:
    (problem,) = problems(tmp_path, {"m": {"kv_bits": 4, name: value}})
    assert problem.startswith(f"models.m.{name}: one of ")


def test_the_kv_that_is_reserved_is_that_of_the_bits_with_their_scales() -> None:
    plain = LoadOptions().load_sum(FILES, 32_768)
    assert plain.kv_floor_bytes == 8192 * 400 * 2
    four = LoadOptions(KvQuantizing(4, 64)).load_sum(FILES, 32_768)
    assert four.kv_floor_bytes == plain.kv_floor_bytes * (4 + 16 * 2 / 64) / 16
    late = LoadOptions(KvQuantizing(4, 64, start=5000)).load_sum(FILES, 32_768)
    assert late.kv_floor_bytes == 5000 * 400 * 2, "until there are more, they take what they always take"
    assert (four.weights_bytes, four.runtime_bytes) == (plain.weights_bytes, plain.runtime_bytes)
