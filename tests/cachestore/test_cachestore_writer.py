import threading
import time
from pathlib import Path

import pytest

from cachestore.block import Block
from cachestore.counters import Drop
from cachestore.store import Store
from cachestore.writer import Writer
from tests.cachestore.cachestore_stand import block_file, make_block, make_chain, make_namespace

CHAIN = make_chain(6)


class SlowStore(Store):
    """A disk whose writes wait until the test lets them through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, make_namespace())
        self.gate = threading.Event()
        self.reached = threading.Event()

    def put(self, block: Block) -> bool:
        self.reached.set()
        assert self.gate.wait(60)
        return super().put(block)


@pytest.fixture
def slow(root: Path) -> SlowStore:
    return SlowStore(root)


def test_what_was_submitted_is_on_disk_after_a_flush(store: Store) -> None:
    writer = Writer(store, 1 << 20)
    assert all(writer.submit(make_block(block_id)) for block_id in CHAIN)
    assert writer.flush(60) == 0
    assert all(store.contains(block_id.key) for block_id in CHAIN)
    assert writer.pending_bytes == 0
    assert writer.close(60) == 0


def test_a_block_can_be_found_from_its_submission_on(slow: SlowStore) -> None:
    writer = Writer(slow, 1 << 20)
    block = make_block(CHAIN[0])
    writer.submit(block)
    slow.reached.wait(60)
    assert writer.pending(block.id.key) is block
    assert slow.get(block.id) is None
    slow.gate.set()
    writer.flush(60)
    assert writer.pending(block.id.key) is None
    assert slow.get(block.id) is not None


def test_a_full_queue_drops_the_block_and_does_not_wait(slow: SlowStore) -> None:
    block = make_block(CHAIN[0])
    writer = Writer(slow, 2 * block.nbytes)
    assert [writer.submit(make_block(block_id)) for block_id in CHAIN[:4]] == [True, True, False, False]
    assert slow.counters().dropped == {Drop.QUEUE_FULL: 2}
    assert writer.pending(CHAIN[2].key) is None
    slow.gate.set()
    assert writer.flush(60) == 0
    assert writer.submit(make_block(CHAIN[2]))
    assert writer.flush(60) == 0
    assert [slow.contains(block_id.key) for block_id in CHAIN[:4]] == [True, True, True, False]


def test_the_same_block_waits_once(slow: SlowStore) -> None:
    block = make_block(CHAIN[0])
    writer = Writer(slow, block.nbytes)
    assert writer.submit(block)
    assert writer.submit(block)
    assert writer.pending_bytes == block.nbytes
    slow.gate.set()
    writer.close(60)


def test_a_touch_follows_the_writes_before_it(store: Store, root: Path) -> None:
    writer = Writer(store, 1 << 20)
    for block_id in CHAIN:
        writer.submit(make_block(block_id))
    writer.touch_chain([block_id.key for block_id in CHAIN])
    writer.close(60)
    times = [block_file(root, block_id).stat().st_mtime_ns for block_id in CHAIN]
    assert times == sorted(times, reverse=True)


def test_a_flush_keeps_its_deadline_and_closing_says_what_was_lost(slow: SlowStore) -> None:
    writer = Writer(slow, 1 << 20)
    *waiting, late = CHAIN
    for block_id in waiting:
        writer.submit(make_block(block_id))
    assert writer.flush(0.05) == len(waiting)
    assert writer.close(0.05) == len(waiting)
    assert slow.counters().dropped == {Drop.CLOSED: len(waiting)}
    assert not writer.submit(make_block(late))
    slow.gate.set()


def test_a_block_that_fails_to_be_written_does_not_stop_the_next(store: Store, root: Path) -> None:
    writer = Writer(store, 1 << 20)
    (block_file_to_be := root / "v1" / ("f" * 16 + "-" + "1" * 16) / CHAIN[0].key[:2]).write_text("in the way")
    writer.submit(make_block(CHAIN[0]))
    writer.submit(make_block(CHAIN[1]))
    assert writer.flush(60) == 0
    assert writer.pending(CHAIN[0].key) is None
    assert [store.contains(block_id.key) for block_id in CHAIN[:2]] == [False, True]
    assert block_file_to_be.is_file()
    writer.close(60)


def test_a_closed_writer_leaves_no_thread(store: Store) -> None:
    before = set(threading.enumerate())
    writer = Writer(store, 1 << 20)
    writer.submit(make_block(CHAIN[0]))
    writer.close(60)
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(60)
    assert not started & set(threading.enumerate())


def test_an_idle_writer_notices_that_the_directory_is_back(root: Path) -> None:
    store = Store(root / "disk" / "cache", make_namespace(), recheck_s=0.02)
    writer = Writer(store, 1 << 20)
    assert store.health.trouble == "missing"
    root.mkdir()
    (root / "disk").mkdir()
    deadline = time.monotonic() + 60
    while store.health.trouble is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.health.trouble is None
    writer.close(60)
