import errno
import json
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cachestore.block import BlockId
from cachestore.counters import Drop, Miss
from cachestore.health import Trouble
from cachestore.store import Store
from tests.cachestore.cachestore_stand import Clock, block_file, files_below, make_block, make_chain, make_namespace

FIRST, SECOND, THIRD = make_chain(3)
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")


def numbers(store: Store, block_id: BlockId) -> bytes | None:
    tensors = store.get(block_id)
    return None if tensors is None else bytes(tensors["keys"].data)


def expected(block_id: BlockId) -> bytes:
    return bytes(make_block(block_id).tensors["keys"].data)


def test_a_block_is_found_by_a_later_process(store: Store, root: Path) -> None:
    assert store.put(make_block(FIRST))
    successor = Store(root, make_namespace())
    assert successor.contains(FIRST.key)
    assert numbers(successor, FIRST) == expected(FIRST)
    assert (successor.counters().hits, store.counters().blocks_written) == (1, 1)
    assert store.counters().bytes_written == block_file(root, FIRST).stat().st_size == successor.counters().bytes_read


def test_the_tree_is_private_and_says_what_it_is(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    directories = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_below(root)} == {0o600}
    [described] = files_below(root, "namespace.json")
    assert json.loads(described.read_text()).items() >= {"model": "org/model", "block_tokens": 4}.items()
    assert block_file(root, FIRST).relative_to(root).parts[:3] == ("v1", "f" * 16 + "-" + "1" * 16, FIRST.key[:2])


def test_an_absent_block_is_a_counted_miss(store: Store) -> None:
    assert not store.contains(FIRST.key)
    assert store.get(FIRST) is None
    assert store.counters().misses == {Miss.ABSENT: 1}


def test_models_and_layouts_never_read_each_other(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    for other in (replace(make_namespace(), fingerprint="e" * 64), replace(make_namespace(), layout="2" * 64)):
        assert Store(root, other).get(FIRST) is None


def test_a_snapshot_lives_beside_the_rows_of_its_block(store: Store) -> None:
    snapshot = replace(FIRST, key=FIRST.key + "s")
    store.put(make_block(FIRST))
    assert not store.contains(snapshot.key)
    store.put(make_block(snapshot, floats=2))
    assert len(numbers(store, snapshot) or b"") == 8
    assert numbers(store, FIRST) == expected(FIRST)


def test_a_published_block_is_never_written_again(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    before = block_file(root, FIRST).stat()
    assert Store(root, make_namespace()).put(make_block(FIRST))
    after = block_file(root, FIRST).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def become_a_directory(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def become_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def become_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


DAMAGE = [flip, truncate, empty, become_a_directory, become_a_fifo, become_a_link, become_huge]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_one_miss_is_set_aside_and_can_be_written_anew(store: Store, root: Path, damage) -> None:
    store.put(make_block(FIRST))
    store.put(make_block(SECOND))
    damage(block_file(root, FIRST))
    assert store.get(FIRST) is None
    assert store.get(FIRST) is None
    assert store.counters().misses == {Miss.BAD: 1, Miss.ABSENT: 1}
    assert sum(store.counters().bad.values()) == 1
    assert [path.name for path in root.rglob("*.bad")] == [FIRST.key + ".safetensors.bad"]
    assert numbers(store, SECOND) == expected(SECOND)
    assert store.put(make_block(FIRST))
    assert numbers(store, FIRST) == expected(FIRST)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_reader_that_may_not_rename_remembers_a_damaged_block(store: Store, root: Path, clock: Clock, damage) -> None:
    store.put(make_block(FIRST))
    damage(block_file(root, FIRST))
    reader = Store(root, make_namespace(), read_only=True, clock=clock)
    assert [reader.get(FIRST), reader.get(FIRST), reader.contains(FIRST.key)] == [None, None, False]
    assert reader.counters().misses == {Miss.BAD: 1, Miss.KNOWN_BAD: 1}
    assert not files_below(root, "*.bad")


def test_a_remembered_block_that_was_written_anew_is_read_again(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    flip(path := block_file(root, FIRST))
    path.with_name(path.name + ".bad").mkdir()  # so the rename fails
    assert store.get(FIRST) is None
    assert not store.contains(FIRST.key)
    assert store.put(make_block(FIRST))
    assert numbers(store, FIRST) == expected(FIRST)


def test_a_remembered_block_is_tried_again_after_a_while(store: Store, root: Path, clock: Clock) -> None:
    store.put(make_block(FIRST))
    reader = Store(root, make_namespace(), read_only=True, clock=clock)
    flip(block_file(root, FIRST))
    reader.get(FIRST)
    flip(block_file(root, FIRST))  # somebody repaired it
    assert reader.get(FIRST) is None
    clock.now += 601
    assert numbers(reader, FIRST) == expected(FIRST)


def test_two_swapped_blocks_are_two_misses(store: Store, root: Path) -> None:
    for block_id in (FIRST, SECOND):
        store.put(make_block(block_id))
    one, two = block_file(root, FIRST), block_file(root, SECOND)
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    assert [store.get(FIRST), store.get(SECOND)] == [None, None]
    assert store.counters().bad == {"identity": 2}


def test_blocks_that_differ_in_an_image_only_cannot_be_swapped(store: Store, root: Path) -> None:
    one, two = FIRST, replace(FIRST, key="0" * 64)
    store.put(make_block(one))
    store.put(make_block(two))
    block_file(root, two).replace(block_file(root, one))
    assert store.get(one) is None


@not_as_root
def test_a_block_that_may_not_be_read_is_a_miss(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    block_file(root, FIRST).chmod(0)
    assert store.get(FIRST) is None
    assert store.counters().misses == {Miss.BAD: 1}


@not_as_root
def test_a_directory_that_may_not_be_written_is_still_read(store: Store, root: Path, clock: Clock) -> None:
    store.put(make_block(FIRST))
    prefix = block_file(root, FIRST).parent
    prefix.chmod(0o500)
    try:
        assert not store.put(make_block(replace(FIRST, key=FIRST.key[:2] + "0" * 62)))
        assert store.health.trouble is Trouble.READ_ONLY
        assert numbers(store, FIRST) == expected(FIRST)
    finally:
        prefix.chmod(0o700)


def test_a_child_is_never_younger_than_its_parents_after_a_touch(store: Store, root: Path) -> None:
    chain = make_chain(30)
    for block_id in chain:
        store.put(make_block(block_id))
    store.touch_chain([block_id.key for block_id in chain])
    times = [block_file(root, block_id).stat().st_mtime_ns for block_id in chain]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_a_touch_keeps_the_order_where_the_clock_stands_still_or_is_set_back(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(3)
    for block_id in chain:
        store.put(make_block(block_id))
    clock_ns = iter([2 * 10**18, 2 * 10**18, 10**18])
    monkeypatch.setattr("cachestore.store.time.time_ns", lambda: next(clock_ns, 10**18))
    store.touch_chain([block_id.key for block_id in chain])
    times = [block_file(root, block_id).stat().st_mtime_ns for block_id in chain]
    assert times == [2 * 10**18 + 2, 2 * 10**18 + 1, 2 * 10**18]


def test_touching_what_was_evicted_is_no_error(store: Store) -> None:
    store.put(make_block(FIRST))
    store.touch_chain([FIRST.key, SECOND.key])


def test_a_read_only_store_changes_nothing(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    reader = Store(root, make_namespace(), read_only=True)
    assert not reader.put(make_block(SECOND))
    reader.touch_chain([FIRST.key])
    assert numbers(reader, FIRST) == expected(FIRST)
    assert reader.counters().dropped == {Drop.READ_ONLY: 1}
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_directory_removed_while_serving_means_misses_and_is_made_again(
    store: Store, root: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(make_block(FIRST))
    shutil.rmtree(root)
    with caplog.at_level(logging.WARNING):
        assert store.get(FIRST) is None
        assert [store.put(make_block(block_id)) for block_id in (FIRST, SECOND, THIRD)] == [False, False, False]
    assert store.health.trouble is Trouble.MISSING
    assert len(caplog.records) == 1
    assert not root.exists()
    clock.now += 31
    assert store.put(make_block(FIRST))
    assert numbers(store, FIRST) == expected(FIRST)
    assert store.health.trouble is None


def test_a_directory_that_became_somebody_elses_is_not_written_to(store: Store, root: Path, clock: Clock) -> None:
    store.put(make_block(FIRST))
    shutil.rmtree(root)
    root.mkdir()
    (root / "thesis.txt").write_text("years of work")
    for _ in range(2):
        assert not store.put(make_block(FIRST))
        clock.now += 31
    assert store.health.trouble is Trouble.NOT_OURS
    assert [path.name for path in root.iterdir()] == ["thesis.txt"]


def test_a_disk_that_is_not_plugged_in_is_not_written_beside(tmp_path: Path, clock: Clock) -> None:
    disk = tmp_path / "Disk"
    store = Store(disk / "cache", make_namespace(), clock=clock)
    assert store.health.trouble is Trouble.MISSING
    assert not store.put(make_block(FIRST))
    assert store.get(FIRST) is None
    assert store.counters().misses == {Miss.UNAVAILABLE: 1}
    assert not disk.exists()
    disk.mkdir()
    clock.now += 31
    assert store.put(make_block(FIRST))


def test_somebody_elses_directory_is_left_alone(root: Path) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("years of work")
    store = Store(root, make_namespace())
    assert store.health.trouble is Trouble.NOT_OURS
    assert not store.put(make_block(FIRST))
    assert [path.name for path in root.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("of", ["root", "namespace", "prefix"])
def test_a_file_where_a_directory_belongs_costs_the_cache_only(store: Store, root: Path, clock: Clock, of: str) -> None:
    store.put(make_block(FIRST))
    path = block_file(root, FIRST)
    spot = {"root": root, "namespace": path.parent.parent, "prefix": path.parent}[of]
    shutil.rmtree(spot)
    spot.write_text("in the way")
    for _ in range(3):
        assert not store.contains(FIRST.key)
        assert store.get(FIRST) is None
        assert not store.put(make_block(FIRST))
        store.touch_chain([FIRST.key])
        clock.now += 31
    assert spot.read_text() == "in the way"


def test_a_failed_write_leaves_no_temporary_behind_and_is_tried_again_later(root: Path) -> None:
    """A real short write: the kernel refuses to let the file grow."""
    limited = subprocess.run(
        [sys.executable, "-c", LIMITED, str(root)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(limited.stdout) == {"small": True, "big": False, "after": False, "later": True, "trouble": "io_error"}
    assert not files_below(root, "*.tmp")


LIMITED = """
import json, resource, signal, sys
from pathlib import Path
from tests.cachestore.cachestore_stand import Clock, make_block, make_chain, make_namespace
from cachestore.store import Store

first, second, third = make_chain(3)
clock = Clock()
store = Store(Path(sys.argv[1]), make_namespace(), clock=clock)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
said = {"small": store.put(make_block(first)), "big": store.put(make_block(second, floats=50_000))}
said["after"], said["trouble"] = store.put(make_block(third)), store.health.trouble
clock.now += 31
said["later"] = store.put(make_block(third))
print(json.dumps(said))
"""


def test_running_out_of_descriptors_does_not_condemn_a_good_block(store: Store, root: Path) -> None:
    store.put(make_block(FIRST))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(fd.name) for fd in Path("/dev/fd").iterdir()), hard))
    try:
        missed, dropped = store.get(FIRST), store.put(make_block(SECOND))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (missed, dropped) == (None, False)
    assert store.counters().misses == {Miss.UNREADABLE: 1}
    assert store.health.trouble is None
    assert numbers(store, FIRST) == expected(FIRST)


def test_a_disk_that_is_full_is_said_to_be_full(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.put(make_block(FIRST))
    monkeypatch.setattr("cachestore.tree.publish", no_space)
    assert not store.put(make_block(SECOND))
    assert store.health.trouble is Trouble.FULL
    assert numbers(store, FIRST) == expected(FIRST)
