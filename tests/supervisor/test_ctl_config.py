"""omlxctl config and doctor, the import of oMLX's settings, and the generated documentation."""

import json
import sys
from pathlib import Path

import pytest

from supervisor import settings_docs
from supervisor.ctl_server import flag_of
from supervisor.doctor import foreign_packages
from supervisor.settings import leaves
from tests.supervisor.ctl_stand import ScriptedSupervisor, Shell

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_docs_settings_md_is_what_the_tree_says() -> None:
    written = (DOCS / "settings.md").read_text()
    assert written == settings_docs.document(), "run: python -m supervisor.settings_docs > docs/settings.md"


def test_every_setting_with_a_flag_has_an_option() -> None:
    for leaf in leaves():
        option = flag_of(leaf)
        assert (option is not None) == (leaf.flag is not None or leaf.path == "cache.enabled"), leaf.path


def test_config_show_names_the_source_of_every_value(shell: Shell, home: Path) -> None:
    (home / "settings.json").write_text(
        json.dumps(
            {
                "server": {"port": 8100},
                "auth": {"api_key": "very-secret"},
                "cache": {"hot_cache_max_size": "2GB"},
                "models": {"m": {"top_k": 3}},
            }
        )
    )
    shell.patch.setenv("OMLX_HOST", "127.0.0.2")
    shell.patch.setenv("OMLX_PROT", "1")
    ran = shell("config", "show")
    lines = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines() if line.strip()}
    assert lines["server.port"] == ["8100", "settings.json"]
    assert lines["server.host"] == ["127.0.0.2", "environment", "OMLX_HOST"]
    assert lines["models.m.top_k"] == ["3", "settings.json"]
    assert "very-secret" not in ran.out
    assert "OMLX_PROT" in ran.err and "OMLX_PORT" in ran.err
    shown = json.loads(shell("config", "show", "--json").out)
    assert shown["values"]["cache.hot_cache_max_size"] == str(2 << 30)
    assert shown["values"]["auth.api_key"] == "(set)"


def test_config_show_asks_the_running_server(shell: Shell, server: ScriptedSupervisor) -> None:
    answer = {"values": {"server.port": 9}, "sources": {"server.port": "flag --port"}, "warnings": ["w"], "home": "/h"}
    server.answers("config", answer)
    ran = shell("config", "show")
    assert "server.port  9      flag --port" in ran.out
    assert "w" in ran.err


def test_config_show_of_a_bad_file_lists_every_problem(shell: Shell, home: Path) -> None:
    (home / "settings.json").write_text('{"server": {"port": "x", "hots": 1}}')
    ran = shell("config", "show")
    assert (ran.status, "server.port" in ran.err, "server.hots" in ran.err) == (2, True, True)


OMLX = {
    "version": "1.0",
    "server": {"host": "127.0.0.1", "port": 8001, "log_level": "debug", "cors_origins": ["*"], "burst_decode_mode": "off"},
    "model": {"model_dirs": ["~/models", "/b"], "model_dir": "~/models", "model_fallback": False},
    "memory": {"max_process_memory": "80%", "memory_guard_tier": "safe", "soft_threshold": 0.85},
    "scheduler": {"max_concurrent_requests": 4},
    "cache": {"enabled": True, "hot_cache_max_size": "0", "ssd_cache_dir": "~/.omlx/cache", "ssd_cache_max_size": "auto"},
    "auth": {"api_key": "omlx-secret", "secret_key": "s"},
    "sampling": {"max_tokens": 32768, "temperature": 0.7, "repetition_penalty": 1.1},
    "logging": {"log_dir": None, "retention_days": 3},
    "ui": {"language": "en"},
}


@pytest.fixture
def omlx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """settings.json in the .omlx of another user directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".omlx" / "settings.json"
    file.parent.mkdir()
    file.write_text(json.dumps(OMLX))
    return file


def test_the_settings_of_omlx_are_taken_over_and_each_key_is_accounted_for(shell: Shell, home: Path, omlx_file: Path) -> None:
    (home / "settings.json").write_text('{"server": {"port": 1, "host": "127.0.0.9"}, "sampling": {"top_k": 5}}')
    ran = shell("config", "import", str(omlx_file))
    assert ran.status == 0, ran.err
    assert json.loads((home / "settings.json").read_text()) == {
        "server": {"host": "127.0.0.1", "port": 8001, "log_level": "debug"},
        "model": {"model_dirs": ["~/models", "/b"]},
        "memory": {"max_process_memory": "80%", "memory_tier": "safe"},
        "scheduler": {"max_concurrent_requests": 4},
        "cache": {"enabled": True, "hot_cache_max_size": 0, "ssd_cache_max_size": "auto"},
        "auth": {"api_key": "omlx-secret"},
        "sampling": {"top_k": 5, "max_tokens": 32768, "temperature": 0.7},
        "logging": {"log_retention_days": 3},
    }
    assert (home / "settings.json").stat().st_mode & 0o077 == 0
    for section, table in OMLX.items():
        for key in table if isinstance(table, dict) else ():
            assert f"{section}.{key}" in ran.out or key == "model_dir"
    assert "omlx-secret" not in ran.out
    assert "the formats differ" in ran.out
    assert "every web page" in ran.out
    assert shell("config", "show").status == 0


def test_importing_writes_nothing_of_omlx(shell: Shell, omlx_file: Path) -> None:
    before = omlx_file.read_bytes()
    shell("config", "import", str(omlx_file))
    assert [p.name for p in omlx_file.parent.iterdir()] == ["settings.json"]
    assert omlx_file.read_bytes() == before


def test_omlxs_own_directory_is_refused_as_home(shell: Shell, omlx_file: Path) -> None:
    shell.patch.setenv("OMLX_HOME", str(omlx_file.parent))
    omlx_file.write_text('{"server": {"port": 8001}}')
    assert shell("config", "import", str(omlx_file)).status == 2
    assert omlx_file.read_text() == '{"server": {"port": 8001}}'


def test_invalid_values_are_all_listed_and_nothing_is_taken(shell: Shell, home: Path, omlx_file: Path) -> None:
    omlx_file.write_text('{"server": {"port": "x"}, "sampling": {"top_p": 3, "top_k": 1}}')
    ran = shell("config", "import", str(omlx_file))
    assert (ran.status, "server.port" in ran.err, "sampling.top_p" in ran.err) == (2, True, True)
    assert not (home / "settings.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_settings_file_is_refused(shell: Shell, home: Path, omlx_file: Path, text: str) -> None:
    omlx_file.write_text(text)
    assert shell("config", "import", str(omlx_file)).status == 2
    assert not (home / "settings.json").exists()


def test_the_older_single_model_dir_counts(shell: Shell, home: Path, omlx_file: Path) -> None:
    omlx_file.write_text('{"model": {"model_dir": "/old"}}')
    shell("config", "import", str(omlx_file))
    assert json.loads((home / "settings.json").read_text()) == {"model": {"model_dirs": ["/old"]}}


def test_doctor_finds_nothing_wrong_here(shell: Shell) -> None:
    ran = shell("doctor", "--json")
    findings = json.loads(ran.out)
    assert ran.status == 0, [f for f in findings if f["level"] == "error"]
    assert {"omlxd", "mlx", "machine", "accelerator", "settings", "home", "run", "server"} <= {f["name"] for f in findings}


def test_doctor_names_bad_settings_and_unwritable_homes(shell: Shell, home: Path) -> None:
    (home / "settings.json").write_text('{"servr": {}}')
    (home / "file").touch()
    shell.patch.setenv("OMLX_RUN_DIR", str(home / "file" / "run"))
    ran = shell("doctor")
    assert ran.status == 1
    assert "servr: unknown section" in ran.out
    assert "file/run cannot be written" in ran.out


def test_doctor_names_a_run_directory_that_is_too_deep(shell: Shell, home: Path) -> None:
    shell.patch.setenv("OMLX_RUN_DIR", str(home / ("d" * 100)))
    ran = shell("doctor")
    assert (ran.status, "ipc sockets allow" in ran.out) == (1, True)


def test_doctor_finds_another_projects_package_of_our_name(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor" / "__init__.py").touch()
    shell.patch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ran = shell("doctor")
    assert (ran.status, str(tmp_path / "supervisor") in ran.out) == (1, True)
    assert foreign_packages(tmp_path / "supervisor") != [tmp_path / "supervisor"]
