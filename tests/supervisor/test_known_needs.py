"""What is remembered of models beyond a run, and when it is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.known_needs import KnownNeeds
from supervisor.slot_events import ModelCost, Remember

A = ModelCost("a", 5, load_key="k1")


def known(path: Path, cost: ModelCost = A) -> int:
    return KnownNeeds(path).added_to([cost])[0].known_bytes


def test_what_a_model_proved_to_need_outlives_the_server(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    assert known(path) == 0
    KnownNeeds(path).note(Remember("a", "k1", 9))
    assert known(path) == 9
    KnownNeeds(path).note(Remember("a", "k1", 0))
    assert known(path) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["models.json"]


def test_it_holds_for_the_files_and_load_settings_it_was_learnt_with(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    KnownNeeds(path).note(Remember("a", "k1", 9))
    assert known(path, ModelCost("a", 5, load_key="k2")) == 0


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"a": {"load_key": 5}}', b"\xff\x00", b'{"a": {"z": ' + b"[" * 200_000])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(damage)
    needs = KnownNeeds(path)
    assert needs.added_to([A])[0].known_bytes == 0 and "begun anew" in caplog.text
    needs.note(Remember("a", "k1", 9))
    assert known(path) == 9


def test_what_cannot_be_written_costs_nothing_but_the_memory_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs = KnownNeeds(tmp_path / "gone" / "models.json")
    needs.note(Remember("a", "k1", 9))
    assert needs.added_to([A])[0].known_bytes == 9 and "cannot be written" in caplog.text
