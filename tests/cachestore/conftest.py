from pathlib import Path

import pytest

from cachestore.store import Store
from tests.cachestore.cachestore_stand import Clock, make_namespace


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path, clock: Clock) -> Store:
    return Store(root, make_namespace(), clock=clock)
