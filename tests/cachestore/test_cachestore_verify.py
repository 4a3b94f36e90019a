"""Looking at a store with nobody running: what it counts, and what it finds wrong."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cachestore.block import BlockId
from cachestore.store import Store
from cachestore.tree import NotOurs
from cachestore.verify import stats, verify
from tests.cachestore.cachestore_stand import BLOCK_TOKENS, block_file, make_block, make_chain, make_namespace

CHAIN = make_chain(6)


@pytest.fixture
def filled(root: Path, store: Store) -> Store:
    for block_id in CHAIN:
        assert store.put(make_block(block_id))
    return store


def test_a_sound_store_is_read_whole_and_nothing_is_wrong(root: Path, filled: Store) -> None:
    heard: list[tuple[int, int]] = []
    [report] = verify(root, lambda done, total: heard.append((done, total)))
    assert (report.model, report.blocks, report.snapshots, report.unreachable, report.bad) == ("org/model", 6, 0, 0, [])
    assert len(heard) == 6 and heard[-1][0] == heard[-1][1] == report.bytes


def test_every_kind_of_damage_is_named_with_its_file_and_left_where_it_is(root: Path, filled: Store) -> None:
    files = [block_file(root, block_id) for block_id in CHAIN]
    flipped = bytearray(files[0].read_bytes())
    flipped[-1] ^= 1
    files[0].write_bytes(flipped)
    files[1].write_bytes(b"")
    os.truncate(files[2], files[2].stat().st_size - 1)
    files[3].write_bytes(files[4].read_bytes())
    files[5].unlink()
    files[5].mkdir()
    [report] = verify(root)
    assert {bad.path: bad.reason for bad in report.bad} == {
        files[0]: "checksum",
        files[1]: "length",
        files[2]: "length",
        files[3]: "key",
    }
    assert all(path.exists() for path in files)
    assert report.blocks == report.unreachable == 1  # of the chain only block 4 is sound, and nothing leads to it


def test_a_block_that_names_itself_wrongly_is_bad_even_if_its_checksum_is_right(root: Path, filled: Store) -> None:
    forged = BlockId(CHAIN[2].key, CHAIN[2].parent, CHAIN[2].start, tuple(range(90, 90 + BLOCK_TOKENS)))
    block_file(root, CHAIN[2]).unlink()
    assert filled.put(make_block(forged))
    [report] = verify(root)
    assert [bad.reason for bad in report.bad] == ["key"]


def test_what_lies_behind_a_gap_is_counted_as_unreachable(root: Path, filled: Store) -> None:
    block_file(root, CHAIN[3]).unlink()
    [report] = verify(root)
    assert (report.blocks, report.unreachable, report.bad) == (5, 2, [])


def test_a_snapshot_is_counted_beside_the_blocks(root: Path, filled: Store) -> None:
    snapshot = replace(CHAIN[1], key=CHAIN[1].key + "s")
    assert filled.put(make_block(snapshot))
    [report] = verify(root)
    assert (report.blocks, report.snapshots, report.bad) == (6, 1, [])
    [counted] = stats(root)
    assert (counted.blocks, counted.snapshots) == (6, 1)


def test_a_model_that_keeps_nothing_but_snapshots_has_nothing_unreachable(root: Path, store: Store) -> None:
    assert store.put(make_block(replace(CHAIN[3], key=CHAIN[3].key + "s")))
    [report] = verify(root)
    assert (report.blocks, report.snapshots, report.unreachable) == (0, 1, 0)


def test_stats_are_per_namespace_and_tell_age_and_bytes(root: Path, filled: Store) -> None:
    other = Store(root, replace(make_namespace(), fingerprint="e" * 64, model="org/other"))
    assert other.put(make_block(CHAIN[0]))
    os.utime(block_file(root, CHAIN[5]), (1000, 1000))
    path = block_file(root, CHAIN[4])
    path.rename(path.with_name(path.name + ".bad"))
    by_model = {counted.model: counted for counted in stats(root)}
    first = by_model["org/model"]
    assert (first.blocks, first.set_aside, first.block_tokens, first.oldest_use) == (5, 1, BLOCK_TOKENS, 1000)
    assert first.newest_use > 1e9
    assert by_model["org/other"].blocks == 1
    assert 0 < by_model["org/other"].bytes < first.bytes


def test_a_namespace_whose_description_is_damaged_is_shown_by_its_directory(root: Path, filled: Store) -> None:
    [description] = root.rglob("namespace.json")
    description.write_text("{")
    assert [counted.model for counted in stats(root)] == [f"({description.parent.name})"]
    assert [report.blocks for report in verify(root)] == [6]


def test_what_is_no_store_is_refused(root: Path, filled: Store) -> None:
    (root / ".omlxd-cache").unlink()
    for look in (stats, verify):
        with pytest.raises(NotOurs):
            look(root)
        with pytest.raises(FileNotFoundError):
            look(root / "nothing")
