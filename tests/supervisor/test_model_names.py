"""Names of models in requests: ids, aliases, profiles, the default; and the settings that give them."""

import json
from pathlib import Path

import pytest

from supervisor.paths import paths_of, prepare
from supervisor.roster import Roster, read_roster
from supervisor.settings import Settings
from supervisor.settings_load import SettingsInvalid, load
from tests.supervisor.model_dirs import model

TWO = {
    "a": {"aliases": ["quick", "gpt:mini"], "profiles": {"cold": {"temperature": 0, "top_k": 1}}, "temperature": 0.5},
    "org/b": {"aliases": ["big"]},
}


def roster(home: Path, models: object, **of_model: object) -> Roster:
    paths = paths_of(home, Settings())
    prepare(paths)
    for name in ("a", "org/b", "c:d"):
        if not (paths.models / name).exists():
            model(paths.models / name)
    (home / "settings.json").write_text(json.dumps({"models": models, "model": of_model}))
    return read_roster(load({}, {}, home).settings, paths, 1 << 34)


def resolved(found: Roster, name: str) -> tuple[str, str | None] | None:
    what = found.resolve(name)
    return (what.entry.id, what.profile) if what else None


def problems(home: Path, document: object) -> list[str]:
    (home / "settings.json").write_text(json.dumps(document))
    with pytest.raises(SettingsInvalid) as refused:
        load({}, {}, home)
    return refused.value.problems


def test_a_name_is_an_id_then_an_alias_then_either_with_a_profile(tmp_path: Path) -> None:
    found = roster(tmp_path, TWO)
    assert resolved(found, "a") == ("a", None)
    assert resolved(found, "quick") == resolved(found, "gpt:mini") == ("a", None)
    assert resolved(found, "a:cold") == resolved(found, "quick:cold") == resolved(found, "gpt:mini:cold") == ("a", "cold")
    assert resolved(found, "big") == ("org/b", None)
    for name in ("", "a:", ":cold", "a:warm", "big:cold", "b", "A"):
        assert resolved(found, name) is None, name


def test_the_default_model_is_for_no_name_and_for_unknown_ones_only_if_allowed(tmp_path: Path) -> None:
    assert resolved(roster(tmp_path, TWO, default="quick:cold"), "") == ("a", "cold")
    assert resolved(roster(tmp_path, TWO, default="quick:cold"), "gpt-9") is None
    assert resolved(roster(tmp_path, TWO, default="big", fallback=True), "gpt-9") == ("org/b", None)
    assert resolved(roster(tmp_path, TWO, default="gone", fallback=True), "gpt-9") is None


def test_a_profile_goes_before_the_model_and_the_model_before_the_rest(tmp_path: Path) -> None:
    models = {"a": {"temperature": 0.5, "min_p": 0.1, "chat_template_kwargs": {"x": 1, "y": 1}}}
    models["a"]["profiles"] = {"p": {"temperature": 0, "chat_template_kwargs": {"y": 2}}}
    found = roster(tmp_path, models)
    entry = found.catalog.get("a")
    assert entry is not None
    plain, profiled = found.defaults(entry), found.defaults(entry, "p")
    assert (plain["temperature"].value, profiled["temperature"].value) == (0.5, 0.0)
    assert profiled["temperature"].source == "profile"
    assert profiled["min_p"].value == 0.1 and profiled["top_p"].source == "server settings"
    assert profiled["chat_template_kwargs"].value == {"x": 1, "y": 2}


def test_names_and_profiles_do_not_make_a_worker_stale(tmp_path: Path) -> None:
    bare, named = roster(tmp_path, {}), roster(tmp_path, TWO, default="a", ttl_s=5)
    assert bare.load_key(bare.catalog.models[0]) == named.load_key(named.catalog.models[0])


def test_pins_and_times_to_live_reach_the_slot_machine(tmp_path: Path) -> None:
    found = roster(tmp_path, {"a": {"pinned": True}, "org/b": {"ttl_s": 0}}, ttl_s=60)
    costs = {cost.model: (cost.pinned, cost.ttl_s) for cost in found.costs()}
    assert costs == {"a": (True, 60.0), "org/b": (False, None)}


def test_a_clash_of_names_is_an_error_that_names_both(tmp_path: Path) -> None:
    said = problems(tmp_path, {"models": {"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}}})
    assert said == ["models.b.aliases: x would name both b and a"]
    said = problems(tmp_path, {"models": {"a": {"aliases": ["b", "a"]}, "b": {}}})
    assert said == ["models.a.aliases: b would name both a and b", "models.a.aliases: a is the model's own id"]
    said = problems(tmp_path, {"models": {"a": {"profiles": {"p": {}}}, "b": {"aliases": ["a:p"]}}})
    assert said == ["models.b.aliases: a:p would name both b and a:p"]


def test_an_alias_that_is_the_id_of_a_model_in_a_directory_is_a_clash_too(tmp_path: Path) -> None:
    found = roster(tmp_path, {"a": {"aliases": ["org/b"]}})
    assert found.clashes() == ["models.a.aliases: org/b would name both a and org/b"]
    assert resolved(found, "org/b") == ("org/b", None)


def test_a_profile_holds_only_what_a_request_may_say_and_every_error_has_its_key_path(tmp_path: Path) -> None:
    profiles = {"p": {"context": 64, "temperature": 9, "temprature": 1}, "q:r": {}, "s": 3}
    assert problems(tmp_path, {"models": {"a": {"profiles": profiles}}}) == [
        "models.a.profiles.p.context: not of a request; set it for the whole model: models.a.context",
        "models.a.profiles.p.temperature: a number from 0 to 2 is expected, not 9",
        "models.a.profiles.p.temprature: unknown setting (did you mean temperature?)",
        "models.a.profiles.q:r: a profile's name is a text without a colon",
        "models.a.profiles.s: an object is expected",
    ]


def test_a_template_is_every_models_and_a_models_own_profile_goes_before_it(tmp_path: Path) -> None:
    templates = {"cold": {"temperature": 0.3}, "hot": {"temperature": 1.5}}
    found = roster(tmp_path, TWO, profile_templates=templates)
    assert resolved(found, "big:cold") == ("org/b", "cold") and resolved(found, "big:none") is None
    both = [entry for entry in found.catalog.models if entry.id != "c:d"]
    by_name = {entry.id: found.defaults(entry, "cold")["temperature"].value for entry in both}
    assert by_name == {"a": 0, "org/b": 0.3}
    assert found.clashes() == []


def test_an_applied_profile_gives_defaults_beneath_one_that_the_request_names(tmp_path: Path) -> None:
    models = {
        "a": {
            "temperature": 0.5,
            "top_k": 7,
            "chat_template_kwargs": {"x": 1, "y": 1},
            "profile": "p",
            "profiles": {"p": {"temperature": 0.1, "chat_template_kwargs": {"y": 2}}, "q": {"chat_template_kwargs": {"z": 3}}},
        }
    }
    found = roster(tmp_path, models)
    entry = found.catalog.get("a")
    assert entry is not None
    plain, named = found.defaults(entry), found.defaults(entry, "q")
    assert (plain["temperature"].value, plain["temperature"].source, plain["top_k"].value) == (0.1, "applied profile", 7)
    assert plain["chat_template_kwargs"].value == {"x": 1, "y": 2}
    assert named["temperature"].value == 0.1 and named["chat_template_kwargs"].value == {"x": 1, "y": 2, "z": 3}
    assert found.load_key(entry) == roster(tmp_path, {}).load_key(entry), "no worker is made stale by it"


def test_references_to_profiles_that_are_not_there_are_errors_with_their_key_path(tmp_path: Path) -> None:
    document = {
        "model": {"profile_templates": {"cold": {"temperature": 0}, "bad": {"context": 64}}},
        "models": {"a": {"profile": "warm"}, "b": {"profile": "cold", "profiles": {"mine": "cold", "other": "clod"}}},
    }
    assert problems(tmp_path, document) == [
        "model.profile_templates.bad.context: not of a request; set it for the whole model: models.ID.context",
        "models.b.profiles.other: there is no clod in model.profile_templates (did you mean cold?)",
        "models.a.profile: there is no profile warm; cold, bad can be",
    ]
    assert problems(tmp_path, {"model": {"profile_templates": {"t": {}}}, "models": {"a": {}, "b": {"aliases": ["a:t"]}}}) == [
        "models.b.aliases: a:t would name both b and a:t"
    ]
