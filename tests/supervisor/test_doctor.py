"""What omlxctl doctor finds: each thing that keeps a server from running well, with what to do about it."""

import json
from collections import namedtuple
from pathlib import Path

import pytest

from supervisor import hardware
from tests.supervisor.ctl_stand import STATUS, ScriptedSupervisor, Shell, plain_dict

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


def found(shell: Shell, name: str) -> list[tuple[str, str]]:
    findings = json.loads(shell("doctor", "--json").out)
    return [(finding["level"], finding["text"]) for finding in findings if finding["name"] == name]


def test_a_build_without_a_fast_path_is_named_with_what_it_lacks(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "slow_path_warning", lambda: "OpenBLAS is not installed")
    assert found(shell, "accelerator") == [("warning", "OpenBLAS is not installed")]


def test_a_mac_without_metal_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.doctor.sys.platform", "darwin")
    monkeypatch.setattr(hardware, "has_metal", lambda: False)
    [(level, text)] = found(shell, "accelerator")
    assert level == "error" and "Apple silicon" in text


def test_a_wired_limit_below_what_the_tier_would_give_is_named_with_the_command(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_metal", lambda: True)
    monkeypatch.setattr(hardware, "total_ram_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(hardware, "wired_limit_bytes", lambda: 8 * GIB)
    levels = dict(found(shell, "budget"))
    assert "sudo sysctl iogpu.wired_limit_mb=" in levels["warning"] and "8.0 GiB" in levels["warning"]
    monkeypatch.setattr(hardware, "wired_limit_bytes", lambda: 30 * GIB)
    assert [level for level, _ in found(shell, "budget")] == ["ok"]


def test_a_disk_that_is_nearly_full_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.doctor.shutil.disk_usage", lambda _: Usage(100 * GIB, 97 * GIB, 3 * GIB))
    for name in ("home", "cache", "logs"):
        [(level, text)] = found(shell, name)
        assert level == "warning" and "has only 3.0 GiB free" in text, name


def test_a_clock_before_this_program_was_written_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.doctor.time.time", lambda: 1e6)
    [(level, text)] = found(shell, "clock")
    assert level == "error" and "1970-01-12" in text


def test_a_server_of_another_version_is_named_with_the_way_out(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("status", {**plain_dict(STATUS), "version": "9.9"})
    assert any("it runs version 9.9" in text and "omlxctl restart" in text for _, text in found(shell, "server"))


def test_versions_and_hardware_are_printed(shell: Shell) -> None:
    for name in ("omlxd", "mlx", "mlx-lm", "tokenizers", "aiohttp", "pyzmq", "machine"):
        [(level, text)] = found(shell, name)
        assert level == "ok" and any(character.isdigit() for character in text), name


@pytest.mark.parametrize("written", ["[]", "null", '{"1": "x"}', '{"abc": 3}', "[" * 50_000])
def test_a_damaged_list_of_children_is_nothing_to_stumble_over(shell: Shell, home: Path, written: str) -> None:
    (home / "run").mkdir(mode=0o700)
    (home / "run" / "children.json").write_text(written)
    assert shell("doctor").status == 0
