"""The write credit on the worker's side: paid before a block is queued, settled when its write is over."""

import threading
from pathlib import Path

import pytest

from cachestore.block import Block
from cachestore.charge import most_disk_bytes
from cachestore.store import Store
from tests.cachestore.cachestore_stand import make_block, make_chain, make_namespace
from worker.spill import Spill

BLOCKS = [make_block(block_id, floats=2000) for block_id in make_chain(8)]
COST = most_disk_bytes(BLOCKS[0])


def used_bytes(root: Path) -> int:
    return sum(max(path.stat().st_blocks * 512, path.stat().st_size) for path in root.rglob("*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", make_namespace())


def test_a_worker_never_writes_more_than_it_was_granted(store: Store) -> None:
    before = used_bytes(store.root)
    spill = Spill(store, 3 * COST)
    for block in BLOCKS:
        spill.put(block)
    assert spill.close(60)[1] == 0
    assert spill.counters()["blocks_written"] == 3  # some of them before it was closed
    assert 0 < used_bytes(store.root) - before <= 3 * COST
    assert spill.counters()["drop_credit"] == 5
    assert spill.counters()["settled_bytes"] == 3 * COST
    assert spill.counters()["credit_bytes"] == 0


def test_more_credit_lets_it_go_on(store: Store) -> None:
    spill = Spill(store, 0)
    spill.put(BLOCKS[0])
    assert not spill.contains(BLOCKS[0].id.key)
    spill.add_credit(COST)
    spill.put(BLOCKS[0])
    assert spill.contains(BLOCKS[0].id.key)


def test_what_waits_to_be_written_is_not_settled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = store.put

    def slow(block: Block) -> bool:
        return go.wait(60) and real(block)

    monkeypatch.setattr(store, "put", slow)
    spill = Spill(store, 10 * COST)
    spill.put(BLOCKS[0])
    spill.put(BLOCKS[0])
    spill.put(BLOCKS[1])
    assert spill.settled_bytes() == 0
    assert spill.counters()["credit_bytes"] == 8 * COST
    go.set()
    spill.close(60)
    assert spill.settled_bytes() == 2 * COST


def test_a_write_that_failed_is_settled_too_and_the_trouble_has_a_name(store: Store) -> None:
    spill = Spill(store, 10 * COST)
    assert spill.trouble is None
    for path in sorted(store.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store.root.rmdir()
    spill.put(BLOCKS[0])
    spill.close(60)
    assert spill.settled_bytes() == COST
    assert spill.counters()["blocks_written"] == 0
    assert spill.trouble is not None and spill.trouble.startswith("missing: ")


def test_a_worker_without_limit_pays_nothing(store: Store) -> None:
    spill = Spill(store, None)
    for block in BLOCKS:
        spill.put(block)
    assert spill.close(60)[1] == 0
    assert spill.counters()["blocks_written"] == 8
    assert "credit_bytes" not in spill.counters()
