"""One server with the real model for all tests that do not harm it, and tiny models for those that do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stands.models import smollm2_dir, tiny_model
from tests.stands.server import Server, running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with so many layers that 200 tokens take a few seconds."""
    return tiny_model(tmp_path_factory.mktemp("slow") / "slow", num_hidden_layers=48)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return smollm2_dir()


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Server]:
    with running({"smollm2": smollm2}) as server:
        server.ctl("load", "smollm2")
        yield server


@pytest.fixture
def small(tiny: Path) -> Iterator[Server]:
    """A server that the test may hurt."""
    with running({"tiny": tiny}) as server:
        yield server
