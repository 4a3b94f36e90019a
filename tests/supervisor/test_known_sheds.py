"""That a model died with its optional features is remembered beyond a run, for the load and the build that it happened with."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.known_sheds import KnownSheds
from supervisor.slot_events import ModelCost, RememberShed


def known(path: Path, load_key: str = "k1") -> bool:
    return KnownSheds(path).added_to([ModelCost("a", 5, load_key=load_key)])[0].known_shed


def test_a_new_server_knows_until_it_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "shed.json"
    KnownSheds(path).note(RememberShed("a", "k1", False))
    assert not known(path) and not path.exists(), "nothing to be said"
    KnownSheds(path).note(RememberShed("a", "k1", True))
    assert known(path)
    KnownSheds(path).note(RememberShed("a", "k1", False))
    assert not known(path)


def test_other_files_settings_or_builds_are_tried_with_all_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shed.json"
    KnownSheds(path).note(RememberShed("a", "k1", True))
    assert not known(path, "k2")
    monkeypatch.setattr("supervisor.known_sheds.build", lambda: "9.9.9")
    assert not known(path)
