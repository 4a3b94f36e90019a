"""Catalog and settings joined: what a load costs, what a worker is told, and when a running one is out of date."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.paths import paths_of, prepare
from supervisor.roster import Roster, read_roster
from supervisor.settings import Settings
from supervisor.settings_load import load
from tests.supervisor.model_dirs import model

GIB = 2**30


class Home:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths = paths_of(directory, Settings())
        prepare(self.paths)
        self.model = model(self.paths.models / "m")

    def roster(self, **settings: Any) -> Roster:
        loaded = load({}, {}, self.directory).settings
        for section, values in settings.items():
            if section == "models":
                loaded = replace(loaded, models=values)
            else:
                loaded = replace(loaded, **{section: replace(getattr(loaded, section), **values)})
        return read_roster(loaded, self.paths, 16 * GIB)

    def key(self, **settings: object) -> str:
        roster = self.roster(**settings)
        return roster.load_key(roster.catalog.models[0])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def of_m(**values: Any) -> dict[str, object]:
    from supervisor.settings import ModelSettings

    return {"m": ModelSettings(**values)}


@pytest.mark.parametrize(
    "settings",
    [
        {"models": of_m(context=256)},
        {"models": of_m(max_concurrent_requests=2)},
        {"models": of_m(kv_bits=4)},
        {"models": of_m(kv_bits=4, kv_group_size=32)},
        {"models": of_m(kv_bits=4, quantized_kv_start=100)},
        {"models": of_m(trust_remote_code=True)},
        {"model": {"trust_remote_code": True}},
        {"scheduler": {"max_concurrent_requests": 3}},
        {"cache": {"enabled": False}},
        {"cache": {"hot_cache_only": True}},
        {"cache": {"block_tokens": 32}},
    ],
    ids=str,
)
def test_a_setting_that_applies_at_load_makes_a_running_worker_stale(home: Home, settings: dict[str, object]) -> None:
    assert home.key(**settings) != home.key()


@pytest.mark.parametrize(
    "settings",
    [
        {"models": of_m(temperature=0.5)},
        {"models": of_m(context=512)},  # its own
        {"sampling": {"max_tokens": 5}},
        {"server": {"log_level": "debug"}},
        {"auth": {"api_key": "k"}},
    ],
    ids=str,
)
def test_a_setting_that_needs_no_load_leaves_a_running_worker_alone(home: Home, settings: dict[str, object]) -> None:
    assert home.key(**settings) == home.key()


def test_weights_or_config_written_anew_make_a_running_worker_stale(home: Home) -> None:
    keys = {home.key()}
    for at, name in ((2.0e9, "model.safetensors"), (2.1e9, "config.json")):
        os.utime(home.model / name, (at, at))
        keys.add(home.key())
    assert len(keys) == 3


def test_a_worker_is_told_everything_it_needs(home: Home) -> None:
    roster = home.roster(models=of_m(context=100, max_concurrent_requests=3), cache={"block_tokens": 32})
    assign = roster.assignment(roster.catalog.models[0], 7, "ipc:///data.sock")
    assert assign.model is not None
    assert (assign.model.id, assign.model.path, assign.model.context) == ("m", str(home.model), 100)
    assert (assign.gen, assign.kind, assign.data_endpoints, assign.max_batch) == (7, "text", ["ipc:///data.sock"], 3)
    assert (assign.cache.dir, assign.cache.block) == (str(home.paths.cache), 32)
    assert assign.cache.hot_bytes == GIB  # a sixteenth of the budget
    assert assign.settings["trust_remote_code"] is False


def test_a_context_can_be_made_shorter_but_not_longer(home: Home) -> None:
    for asked, given in ((100, 100), (4096, 512), (None, 512)):
        roster = home.roster(models=of_m(context=asked))
        assert roster.context(roster.catalog.models[0]) == given


def test_trust_in_one_model_goes_before_trust_in_all(home: Home) -> None:
    roster = home.roster(model={"trust_remote_code": True}, models=of_m(trust_remote_code=False))
    assert roster.assignment(roster.catalog.models[0], 1, "").settings["trust_remote_code"] is False


def test_no_cache_means_no_directory_and_no_hot_bytes(home: Home) -> None:
    roster = home.roster(cache={"enabled": False})
    cache = roster.assignment(roster.catalog.models[0], 1, "").cache
    assert (cache.dir, cache.hot_bytes) == (None, 0)
    roster = home.roster(cache={"hot_cache_only": True})
    cache = roster.assignment(roster.catalog.models[0], 1, "").cache
    assert cache.dir is None and cache.hot_bytes > 0


def test_a_load_is_charged_the_sum_that_a_refusal_shows_and_its_hot_cache_is_no_part_of_it(home: Home) -> None:
    roster = home.roster()
    [cost] = roster.costs()
    entry = roster.catalog.models[0]
    parts = roster.load_sum(entry)
    assert cost.load_bytes == parts.total_bytes == roster.estimate_bytes(entry)
    assert cost.load_detail == str(parts)
    assert (cost.weights_bytes, cost.kv_bytes) == (parts.weights_bytes, parts.kv_floor_bytes)
    assert cost.hot_bytes == roster.assignment(entry, 1, "").cache.hot_bytes == GIB


def test_a_worker_is_told_what_of_its_hot_cache_it_is_given(home: Home) -> None:
    roster = home.roster()
    assign = roster.assignment(roster.catalog.models[0], 1, "", hot_bytes=5)
    assert (assign.grants.hot_bytes, assign.cache.hot_bytes) == (5, GIB)


def test_our_own_models_go_before_those_of_other_directories(home: Home, tmp_path: Path) -> None:
    model(tmp_path / "more" / "m")
    model(tmp_path / "more" / "n")
    roster = home.roster(model={"model_dirs": (str(tmp_path / "more"),)})
    assert [(entry.id, entry.path.parent.name) for entry in roster.catalog.models] == [("m", "models"), ("n", "more")]
