"""Settings that nobody meant: what a file or a variable can hold and no server could use is refused before anything starts."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from supervisor.settings_edit import set_value
from supervisor.settings_load import SettingsInvalid, load
from supervisor.settings_lock import NotWritten, changing
from tests.stands.server import OMLXCTL
from tests.supervisor.ctl_stand import Shell
from tests.supervisor.model_dirs import model


def problems(home: Path, document: object, environ: dict[str, str] | None = None) -> list[str]:
    (home / "settings.json").write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(SettingsInvalid) as refused:
        load(environ or {}, {}, home)
    return refused.value.problems


def test_a_file_nested_beyond_measure_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "[" * 100_000)
    assert "settings.json" in problem


def test_half_a_character_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    for models in ({"\ud800": {}}, {"a": {"profiles": {"\ud800": {}}}}, {"a": {"aliases": ["x\ud800"]}}):
        [problem] = problems(tmp_path, {"models": models})
        assert "surrogates not allowed" in problem
    [problem] = problems(tmp_path, {}, {"OMLX_DEFAULT_MODEL": "\udcff"})
    assert "model.default" in problem and "halves of characters" in problem


def test_a_null_byte_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"model": {"model_dirs": ["/models\x00"]}})
    assert "model.model_dirs" in problem


def test_the_home_of_nobody_is_refused_by_its_key(tmp_path: Path) -> None:
    nobody = "~no-such-user/x"
    wrong = problems(
        tmp_path,
        {
            "server": {"run_dir": nobody},
            "model": {"model_dirs": ["/a", nobody]},
            "cache": {"ssd_cache_dir": nobody},
            "logging": {"log_dir": nobody},
            "models": {"a": {"adapters": {"style": nobody}, "draft_model": nobody}},
        },
    )
    assert len(wrong) == 6 and all("there is no home ~no-such-user" in problem for problem in wrong)
    with pytest.raises(SettingsInvalid, match="OMLX_HOME"):
        load({"OMLX_HOME": nobody})


def test_a_number_that_fits_no_message_is_refused(tmp_path: Path) -> None:
    said = problems(tmp_path, {"scheduler": {"max_queue": 10**30}, "models": {"a": {"max_tokens": 2**60}}})
    assert len(said) == 2 and all("a whole number from" in problem for problem in said)


def test_levels_of_pressure_come_in_their_order(tmp_path: Path) -> None:
    said = problems(tmp_path, {"memory": {"soft_threshold": 0.95, "hard_threshold": 0.9, "critical_threshold": 0.5}})
    assert said == [
        "memory.hard_threshold: 0.9 is below soft_threshold, which is 0.95",
        "memory.critical_threshold: 0.5 is below hard_threshold, which is 0.9",
    ]
    [alone] = problems(tmp_path, {"memory": {"memory_tier": "safe", "critical_threshold": 0.8}})
    assert alone == "memory.critical_threshold: 0.8 is below soft_threshold, which is 0.85"


def test_config_set_writes_no_name_that_would_mean_two_models(shell: Shell, home: Path) -> None:
    for name in ("a", "b"):
        model(home / "models" / name)
    ran = shell("config", "set", "models.a.aliases", '["b"]')
    assert (ran.status, "b would name both a and b" in ran.err) == (2, True)
    assert not (home / "settings.json").exists()
    assert shell("config", "set", "models.a.aliases", '["c"]').status == 0


def test_of_two_clashes_each_is_put_right_by_itself(shell: Shell, home: Path) -> None:
    for name in ("a", "b", "c", "d"):
        model(home / "models" / name)
    (home / "settings.json").write_text(json.dumps({"models": {"a": {"aliases": ["c"]}, "b": {"aliases": ["d"]}}}))
    assert shell("config", "set", "models.a.aliases", '["x", "d"]').status == 2, "another clash in its place"
    assert shell("config", "set", "models.a.aliases", "auto").status == 0
    assert shell("config", "set", "models.b.aliases", "auto").status == 0


def test_doctor_names_what_clashes_with_the_models_and_what_names_none(shell: Shell, home: Path) -> None:
    for name in ("a", "b"):
        model(home / "models" / name)
    document = {"model": {"default": "x", "preload": ["a", "y"]}, "models": {"a": {"aliases": ["b"]}, "z": {}}}
    (home / "settings.json").write_text(json.dumps(document))
    found = {(f["level"], f["text"]) for f in json.loads(shell("doctor", "--json").out) if f["name"] == "settings"}
    assert {
        ("error", "models.a.aliases: b would name both a and b"),
        ("warning", "model.default: there is no model x"),
        ("warning", "model.preload: there is no model y"),
        ("warning", "models.z: there is no such model"),
    } <= found


def test_config_set_on_a_full_disk_says_so_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    before = '{"server": {"port": 1}}'
    (tmp_path / "settings.json").write_text(before)
    command = 'ulimit -f 0; exec "$@"'  # no byte can be written to any file
    done = subprocess.run(
        ["bash", "-c", command, "bash", *OMLXCTL, "config", "set", "server.port", "2"],
        env={**os.environ, "OMLX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "server.port is not set" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "settings.json").read_text() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "settings.json"]


def test_of_settings_that_are_set_at_the_same_moment_none_is_lost(tmp_path: Path) -> None:
    wanted = {"sampling.top_k": 3, "timers.stop_s": 4, "scheduler.max_queue": 5, "server.keepalive_s": 6}
    env = {**os.environ, "OMLX_HOME": str(tmp_path)}
    with changing(tmp_path):  # all of them have come to the file before the first may read it
        running = [
            subprocess.Popen([*OMLXCTL, "config", "set", key, str(value)], env=env, stdout=subprocess.PIPE)
            for key, value in wanted.items()
        ]
        time.sleep(0.5)
    for process in running:
        process.communicate(timeout=60)
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    written = json.loads((tmp_path / "settings.json").read_text())
    assert {f"{section}.{key}": value for section, table in written.items() for key, value in table.items()} == wanted


def test_somebody_who_hangs_in_the_middle_of_a_change_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with changing(tmp_path), pytest.raises(NotWritten, match="does not get done"):
        set_value(tmp_path, "server.port", 1, wait_s=0.05)
    assert not (tmp_path / "settings.json").exists()
