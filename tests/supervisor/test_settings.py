"""The settings: four sources, every error at once, and what a reload may change."""

import json
from pathlib import Path

import pytest

from supervisor.settings import value_of
from supervisor.settings_load import Loaded, SettingsInvalid, load
from supervisor.settings_reload import flags_of, take_over
from supervisor.settings_values import Refused, Size, size


def write(home: Path, document: object) -> None:
    (home / "settings.json").write_text(document if isinstance(document, str) else json.dumps(document))


def test_flags_go_before_the_environment_that_before_the_file_and_that_before_the_default(tmp_path: Path) -> None:
    write(tmp_path, {"server": {"host": "file", "port": 1, "log_level": "error"}})
    loaded = load({"OMLX_HOST": "env", "OMLX_PORT": "2"}, {"server.host": "flag"}, tmp_path)
    server = loaded.settings.server
    assert (server.host, server.port, server.log_level, server.keepalive_s) == ("flag", 2, "error", 10.0)
    sources = [loaded.sources[f"server.{key}"] for key in ("host", "port", "log_level", "keepalive_s")]
    assert sources == ["flag --host", "environment OMLX_PORT", "settings.json", "default"]


def test_everything_that_is_wrong_is_listed_with_its_key_path(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "server": {"port": 70000, "hots": "x"},
            "sevrer": {},
            "cache": [],
            "memory": {"max_model_memory": "120%"},
            "models": {"m": {"context": 3, "tempersture": 1}, "n": 4},
        },
    )
    with pytest.raises(SettingsInvalid) as caught:
        load({"OMLX_TOP_P": "x"}, {}, tmp_path)
    wrong = "\n".join(caught.value.problems)
    for part in (
        *("server.port (settings.json): a whole number from 0 to 65535 is expected, not 70000", "server.hots: unknown setting"),
        *("sevrer: unknown section (did you mean server?)", "cache: an object", "memory.max_model_memory (settings.json)"),
        *("models.m.context", "models.m.tempersture: unknown setting (did you mean temperature?)", "models.n: an object"),
        "sampling.top_p (environment OMLX_TOP_P): a number from 0 to 1 is expected, not 'x'",
    ):
        assert part in wrong
    assert len(caught.value.problems) == 9


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"server": 1}', "\x00"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(SettingsInvalid):
        load({}, {}, tmp_path)


def test_a_value_that_is_wrong_is_an_error_even_where_another_source_goes_before_it(tmp_path: Path) -> None:
    write(tmp_path, {"server": {"port": -1}})
    with pytest.raises(SettingsInvalid, match=r"server\.port \(settings\.json\)"):
        load({"OMLX_PORT": "8000"}, {}, tmp_path)


def test_no_file_and_an_unknown_variable_are_no_errors_but_the_variable_is_reported(tmp_path: Path) -> None:
    loaded = load({"OMLX_PROT": "1", "OMLX_HOME": "x", "PATH": "y"}, {}, tmp_path)
    [warning] = loaded.warnings
    assert "OMLX_PROT" in warning and "did you mean OMLX_PORT" in warning


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("32GB", 32 * 2**30), ("1.5 MiB", 3 * 2**19), ("7", 7), (9, 9), ("4k", 4096), ("0", 0)),
        *(("80%", 0.8), ("12.5%", 0.125), ("100 %", 1.0)),
    ],
)
def test_sizes_are_bytes_or_shares_and_survive_being_written_and_read_again(given: object, expected: float) -> None:
    parsed = size(given)
    assert parsed == (Size(share=expected) if isinstance(expected, float) else Size(bytes=expected))
    assert size(str(parsed)) == parsed


@pytest.mark.parametrize("given", ["101%", "-1", -1, True, "", "GB", None, [], "1e3"])
def test_what_is_no_size_is_refused(given: object) -> None:
    with pytest.raises(Refused):
        size(given)


# Reload


def loaded(home: Path, document: object, flags: dict[str, object] | None = None) -> Loaded:
    write(home, document)
    return load({}, flags or {}, home)


def test_a_reload_takes_over_what_can_change_and_says_what_cannot(tmp_path: Path) -> None:
    old = loaded(tmp_path, {"server": {"port": 8000}})
    new = loaded(tmp_path, {"server": {"port": 9000, "cors_origins": ["*"]}, "models": {"m": {"top_k": 3}}})
    outcome = take_over(old, new)
    assert (outcome.changed, outcome.restart) == (["server.cors_origins", "models.m"], ["server.port"])
    assert outcome.loaded.settings.server.cors_origins == ("*",)
    assert outcome.loaded.settings.server.port == 8000


def test_what_waits_for_a_start_is_said_again_at_the_next_reload(tmp_path: Path) -> None:
    old = loaded(tmp_path, {})
    first = take_over(old, loaded(tmp_path, {"memory": {"memory_tier": "safe"}}))
    assert first.loaded.sources["memory.memory_tier"] == "default"
    second = take_over(first.loaded, loaded(tmp_path, {"memory": {"memory_tier": "safe"}}))
    assert second.restart == ["memory.memory_tier"]
    third = take_over(second.loaded, loaded(tmp_path, {}))
    assert (third.changed, third.restart) == ([], [])


def test_a_models_settings_that_were_taken_away_are_a_change(tmp_path: Path) -> None:
    old = loaded(tmp_path, {"models": {"m": {"top_k": 3}}})
    assert take_over(old, loaded(tmp_path, {})).changed == ["models.m"]


def test_flags_still_go_before_the_file_after_a_reload(tmp_path: Path) -> None:
    flags = {"sampling.temperature": "0.5", "memory.max_model_memory": "12.5%", "model.model_dirs": ("a", "b")}
    old = loaded(tmp_path, {}, flags)
    write(tmp_path, {"sampling": {"temperature": 1.5}, "memory": {"max_model_memory": "1GB"}})
    outcome = take_over(old, load({}, flags_of(old), tmp_path))
    assert (outcome.changed, outcome.restart) == ([], [])
    assert value_of(outcome.loaded.settings, "memory.max_model_memory") == Size(share=0.125)
