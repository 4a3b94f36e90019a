"""Fixtures of the tests of omlxctl."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor.ctl_stand import ScriptedSupervisor, Shell


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An OMLX_HOME with a short path, as sockets need it, and no OMLX_ variable besides."""
    for name in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="omlx-") as directory:
        monkeypatch.setenv("OMLX_HOME", directory)
        yield Path(directory)


@pytest.fixture
def shell(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(home, monkeypatch, capsys)


@pytest.fixture
def server(home: Path) -> Iterator[ScriptedSupervisor]:
    with ScriptedSupervisor(home) as running:
        yield running
