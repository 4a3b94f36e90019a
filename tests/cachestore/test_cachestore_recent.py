"""Reading ahead: latest used first, every block after the one before it, and nothing that lost its beginning."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from cachestore.block import Block, BlockId, Tensor
from cachestore.keys import block_key, chain, snapshot_key
from cachestore.recent import Recent
from cachestore.store import Namespace, Store
from tests.stands.patience import patient_s

BLOCK = 4
ROOT = b"r" * 32


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", Namespace("m", "f" * 64, "1" * 64, BLOCK))


def blocks(length: int, seed: int, root: bytes = ROOT) -> list[Block]:
    tokens = [seed * 1000 + i for i in range(length * BLOCK)]
    hashes = chain(root, tokens, BLOCK)
    return [
        Block(
            BlockId(block_key(own), parent, i * BLOCK, tuple(tokens[i * BLOCK : (i + 1) * BLOCK])),
            {"kv0": Tensor("U8", (8,), bytes(8))},
        )
        for i, (parent, own) in enumerate(zip([root, *hashes], hashes, strict=False))
    ]


def snapshot_of(block: Block) -> Block:
    after = bytes.fromhex(block.id.key)
    return Block(
        BlockId(snapshot_key(after), block.id.parent, block.id.start, block.id.tokens), {"state0": Tensor("U8", (8,), bytes(8))}
    )


def keep(store: Store, chain_of: list[Block]) -> list[str]:
    for block in chain_of:
        assert store.put(block)
    keys = [block.id.key for block in chain_of]
    store.touch_chain(keys)
    return keys


def order(store: Store) -> list[str]:
    return [block.key for block in Recent(store.directory).in_order()]


def test_chains_come_latest_first_each_from_its_root_on(store: Store) -> None:
    old, young = keep(store, blocks(5, 1)), keep(store, blocks(4, 2))
    assert order(store) == [*young, *old]
    store.touch_chain(old)
    assert order(store) == [*old, *young]


def test_a_block_comes_after_its_parent_however_the_times_lie(store: Store) -> None:
    keys = keep(store, blocks(6, 1))
    for age, key in enumerate(keys):  # the leaf was used last, the root first
        path = next(store.directory.rglob(f"{key}.safetensors"))
        os.utime(path, ns=(10**18 + age, 10**18 + age))
    assert order(store) == keys


def test_what_lost_its_beginning_or_is_not_what_its_name_says_is_left_out(store: Store) -> None:
    broken, whole, swapped = keep(store, blocks(4, 1)), keep(store, blocks(3, 2)), keep(store, blocks(3, 3))
    next(store.directory.rglob(f"{broken[1]}.safetensors")).unlink()
    paths = [next(store.directory.rglob(f"{key}.safetensors")) for key in swapped]
    paths[1].write_bytes(paths[2].read_bytes())
    assert order(store) == [swapped[0], *whole, broken[0]]


def test_damage_of_any_kind_is_left_out(store: Store) -> None:
    keys = keep(store, blocks(4, 1))
    path = next(store.directory.rglob(f"{keys[3]}.safetensors"))
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[: len(whole) // 2], b"\xff" * 40, whole[:8] + b"{" * 200, _with_a_huge_span(whole)):
        path.write_bytes(damaged)
        assert order(store) == keys[:3]
    path.unlink()
    path.mkdir()
    assert order(store) == keys[:3]


def _with_a_huge_span(whole: bytes) -> bytes:
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["tokens"]["data_offsets"] = [0, 2**62]
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


def test_a_snapshot_comes_after_the_rows_of_its_block(store: Store) -> None:
    rows = blocks(4, 1)
    snapshot = snapshot_of(rows[2])
    store.put(snapshot)
    keys = keep(store, rows)
    store.touch_chain([snapshot.id.key])
    assert order(store) == [*keys[:3], snapshot.id.key, keys[3]]


def test_of_a_model_without_rows_the_snapshots_stand_alone(store: Store) -> None:
    first, second = (snapshot_of(block) for block in blocks(2, 1))
    keep(store, [first])
    keep(store, [second])
    assert order(store) == [second.id.key, first.id.key]


def test_a_namespace_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list(Recent(tmp_path / "none").in_order()) == []


def test_two_thousand_blocks_of_one_chain_and_what_it_takes_to_list_them(store: Store) -> None:
    keys = keep(store, blocks(2000, 1))
    before = psutil.Process().num_fds()
    began = time.monotonic()
    assert order(store) == keys
    assert time.monotonic() - began < patient_s(5.0)
    assert psutil.Process().num_fds() <= before  # fewer, if what an earlier test forgot was closed meanwhile
