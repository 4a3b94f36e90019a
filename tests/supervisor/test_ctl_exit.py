"""Every command of omlxctl by one rule: what its exit status means, and that --json is JSON whatever happens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from supervisor import ctl
from supervisor.client import CallFailed
from supervisor.ctl_exit import MANUAL, CommandFailed, Exit, report, status_of_code
from supervisor.protocol import Code

LEFT_OUT = ("service",)
"""They change this machine, and say of most that it has no such service manager."""


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield words, command
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            if name not in LEFT_OUT:
                yield from leaves(one, (*words, name))


def with_json() -> list[list[str]]:
    """Each command that has --json, with a name that means nothing wherever one has to be given."""
    found: list[list[str]] = []
    for words, command in leaves(ctl.omlxctl):
        if any("--json" in parameter.opts for parameter in command.params):
            needed = [
                "nobody" for p in command.params if isinstance(p, click.Argument) and p.required for _ in range(abs(p.nargs))
            ]
            found.append([*words, "--json", *needed])
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMLX_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


@pytest.mark.parametrize("words", with_json(), ids=" ".join)
def test_without_a_server_every_command_prints_json_and_ends_with_a_documented_status(
    words: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["omlxctl", *words])
    status = ctl._run(ctl.omlxctl)  # pyright: ignore[reportPrivateUsage]
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    if status != Exit.DONE and "error" in said:
        error = said["error"]
        assert (error["exit_status"], status) == (status, Exit(status)) and error["message"] in printed.err
        assert f"  {status} " in MANUAL
        if status == Exit.NOT_RUNNING:
            assert error["code"] == "not_running" and "omlxctl serve" in error["message"], "what to do next"
    else:
        assert words[0] in ("models", "config", "cache", "doctor", "status", "ps")


def test_there_are_many_of_them() -> None:
    assert len(with_json()) > 25


def test_a_wrong_command_line_is_told_to_programs_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["status", "--json", "--nonsense"], ["trace", "--json"], ["nonsense", "--json"]):
        monkeypatch.setattr("sys.argv", ["omlxctl", *words])
        assert ctl._run(ctl.omlxctl) == Exit.USAGE  # pyright: ignore[reportPrivateUsage]
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"
    monkeypatch.setattr("sys.argv", ["omlxctl", "nonsense"])
    assert ctl._run(ctl.omlxctl) == Exit.USAGE  # pyright: ignore[reportPrivateUsage]
    assert not capsys.readouterr().out, "nobody asked for it"


def test_what_is_answered_already_is_not_followed_by_a_second_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(CommandFailed("some could not be deleted", answered=True), as_json=True) == Exit.FAILED
    assert not capsys.readouterr().out


@pytest.mark.parametrize("code", Code)
def test_every_outcome_has_a_status_of_the_manual(code: Code, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(CallFailed(code, "why"), as_json=True) == status_of_code(code)
    said = json.loads(capsys.readouterr().out)
    assert said == {"error": {"code": code.value, "message": "why", "exit_status": int(status_of_code(code))}}
