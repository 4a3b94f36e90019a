"""The RAM tier's promises, over any order of uses: never over its limit, never a chain that lacks its beginning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.block import Block, BlockId, Tensor
from worker.hot import HotTier

BLOCK_BYTES = 100 + 4


def block(key: str, token: int = 1) -> Block:
    return Block(BlockId(key, b"", 0, (token,)), {"kv0": Tensor("U8", (100,), bytes(100))})


def keys(chain: int, length: int) -> list[str]:
    return [f"{chain}/{i}" for i in range(length)]


def put_chain(hot: HotTier, chain: int, length: int) -> None:
    names = keys(chain, length)
    for i, name in enumerate(names):
        hot.put(block(name), names[:i])
    hot.touch(names)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=30), st.integers(0, 12))
def test_the_limit_holds_and_what_is_left_of_a_chain_is_its_beginning(uses: list[tuple[int, int]], room: int) -> None:
    hot = HotTier(room * BLOCK_BYTES)
    for chain, length in uses:
        put_chain(hot, chain, length)
        assert hot.bytes <= room * BLOCK_BYTES
        for other in range(4):
            present = [hot.contains(key) for key in keys(other, 8)]
            assert present == sorted(present, reverse=True), f"chain {other} has a hole"


def test_the_least_recently_used_chain_goes_first() -> None:
    hot = HotTier(6 * BLOCK_BYTES)
    put_chain(hot, 1, 3)
    put_chain(hot, 2, 3)
    hot.touch(keys(1, 3))
    put_chain(hot, 3, 3)
    assert [hot.contains(f"{chain}/0") for chain in (1, 2, 3)] == [True, False, True]


def test_a_chain_longer_than_the_limit_keeps_its_beginning() -> None:
    hot = HotTier(4 * BLOCK_BYTES)
    put_chain(hot, 1, 9)
    assert [hot.contains(key) for key in keys(1, 9)] == [True] * 4 + [False] * 5
    assert hot.counters.refused == 5


def test_a_block_with_other_tokens_is_no_hit() -> None:
    hot = HotTier(4 * BLOCK_BYTES)
    hot.put(block("1/0", token=1), [])
    assert hot.get(block("1/0", token=1).id) is not None
    assert hot.get(block("1/0", token=2).id) is None


def test_freeing_takes_leaves_before_roots_and_resizing_lasts() -> None:
    hot = HotTier(8 * BLOCK_BYTES)
    put_chain(hot, 1, 6)
    hot.free(2 * BLOCK_BYTES)
    assert [hot.contains(key) for key in keys(1, 6)] == [True] * 4 + [False] * 2
    hot.resize(2 * BLOCK_BYTES)
    put_chain(hot, 1, 6)
    assert [hot.contains(key) for key in keys(1, 6)] == [True] * 2 + [False] * 4
    hot.resize(0)
    assert (hot.bytes, hot.is_on) == (0, False)


def test_filling_takes_only_free_room_and_puts_the_latest_chain_behind_what_is_here() -> None:
    hot = HotTier(6 * BLOCK_BYTES)
    put_chain(hot, 1, 2)
    hot.fill([block(key) for key in (*keys(2, 2), *keys(3, 3))])
    assert [hot.contains(f"{chain}/{i}") for chain, i in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2))] == [True] * 4 + [False]
    put_chain(hot, 4, 2)  # the oldest go first: those read back, from the end of the last chain on
    assert [hot.contains(key) for key in (*keys(2, 2), *keys(3, 2), *keys(1, 2))] == [True, True, False, False, True, True]


def test_nothing_is_filled_in_once_something_had_to_go() -> None:
    hot = HotTier(4 * BLOCK_BYTES)
    put_chain(hot, 1, 5)
    hot.free(4 * BLOCK_BYTES)
    hot.fill([block(key) for key in keys(2, 2)])
    assert hot.bytes == 0


def test_the_rest_of_a_chain_that_found_no_room_is_refused_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all blocks before it, for each of thousands of blocks, took seconds."""
    hot, looks = HotTier(4 * BLOCK_BYTES), []
    touch = HotTier.touch
    monkeypatch.setattr(HotTier, "touch", lambda hot, chain: (looks.append(len(chain)), touch(hot, chain))[1])
    names = keys(1, 50)
    for i, name in enumerate(names):
        hot.put(block(name), names[:i])
    assert looks == [4]
    hot.resize(6 * BLOCK_BYTES)
    for i, name in enumerate(names):
        hot.put(block(name), names[:i])
    assert [hot.contains(name) for name in names[:7]] == [True] * 6 + [False]
