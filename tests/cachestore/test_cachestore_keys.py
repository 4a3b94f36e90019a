import json
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.keys import block_key, chain, layout_id, namespace_root, snapshot_key, weights_fingerprint

ROOT = namespace_root("tag", "fp", "layout")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(token_lists, st.integers(1, 9))
def test_only_full_blocks_have_a_hash(tokens: list[int], block_tokens: int) -> None:
    assert len(chain(ROOT, tokens, block_tokens)) == len(tokens) // block_tokens


@given(token_lists, token_lists, st.integers(1, 9))
def test_two_prompts_share_exactly_the_blocks_of_their_common_prefix(a: list[int], b: list[int], block_tokens: int) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    pairs = zip(chain(ROOT, a, block_tokens), chain(ROOT, b, block_tokens), strict=False)
    assert sum(x == y for x, y in pairs) == common // block_tokens


@given(token_lists, st.integers(1, 9), st.integers(0, 5))
def test_a_chain_goes_on_from_any_of_its_hashes(tokens: list[int], block_tokens: int, cut: int) -> None:
    whole = chain(ROOT, tokens, block_tokens)
    cut = min(cut, len(whole))
    middle = whole[cut - 1] if cut else ROOT
    assert chain(middle, tokens[cut * block_tokens :], block_tokens) == whole[cut:]


def test_the_hash_is_the_documented_one() -> None:
    expected = sha256(ROOT + b"image" + struct.pack("<2I", 7, 2**32 - 1)).digest()
    assert chain(ROOT, [7, 2**32 - 1], 2, [b"image"]) == [expected]
    assert (block_key(expected), snapshot_key(expected)) == (expected.hex(), expected.hex() + "s")


def test_an_image_changes_the_chain_from_its_block_on_and_not_before() -> None:
    plain, one, other = (chain(ROOT, range(12), 4, extras) for extras in ([], [b"", b"one"], [b"", b"two"]))
    assert plain[0] == one[0] == other[0]
    assert len({plain[1], one[1], other[1]}) == len({plain[2], one[2], other[2]}) == 3


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_number_that_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(struct.error):
        chain(ROOT, [token], 1)


@given(st.lists(st.tuples(st.text(), st.text(), st.text(), st.text()), min_size=2, max_size=2, unique=True))
def test_every_part_of_the_root_counts(two: list[tuple[str, str, str, str]]) -> None:
    assert namespace_root(*two[0]) != namespace_root(*two[1])


def test_a_salt_with_half_a_surrogate_pair_is_a_salt() -> None:
    assert namespace_root("t", "f", "l", "\ud800") != namespace_root("t", "f", "l", "\ud801")


def test_a_layout_tells_its_parts_apart() -> None:
    assert layout_id([b"ab", b"c"]) != layout_id([b"a", b"bc"])


def write_shard(path: Path, fill: Callable[[int], int] = lambda index: index) -> Path:
    """Five tensors of 20,000 bytes; all bytes of tensor n are fill(n)."""
    size = 20_000
    described = {f"w{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n in range(5)}
    header = json.dumps(described).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(bytes([fill(n)]) * size for n in range(5)))
    return path


@pytest.mark.parametrize("changed", range(5))
def test_new_numbers_in_any_tensor_are_another_model(tmp_path: Path, changed: int) -> None:
    shard = write_shard(tmp_path / "model.safetensors")
    before = weights_fingerprint([shard], [b"config"])
    write_shard(shard, lambda index: 99 if index == changed else index)
    assert weights_fingerprint([shard], [b"config"]) != before


def test_a_copied_model_keeps_its_fingerprint(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    (tmp_path / "copy").mkdir()
    copies = [write_shard(tmp_path / "copy" / name.name) for name in reversed(shards)]
    assert weights_fingerprint(shards, [b"config"]) == weights_fingerprint(copies, [b"config"])


def test_names_overrides_and_adapters_count(tmp_path: Path) -> None:
    shard, other = write_shard(tmp_path / "model.safetensors"), write_shard(tmp_path / "renamed.safetensors")
    adapter = tmp_path / "adapter.npz"
    adapter.write_bytes(b"low rank")
    prints = [
        weights_fingerprint([shard], [b"config"]),
        weights_fingerprint([other], [b"config"]),
        weights_fingerprint([shard], [b"config", b"dtype=bf16"]),
        weights_fingerprint([shard, adapter], [b"config"]),
    ]
    adapter.write_bytes(b"low rang")
    prints.append(weights_fingerprint([shard, adapter], [b"config"]))
    assert len(set(prints)) == 5


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 8, (6).to_bytes(8, "little") + b"[[[[[[", bytes(100_000)])
def test_a_file_that_is_no_safetensors_is_sampled_all_the_same(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    before = weights_fingerprint([path], [])
    path.write_bytes(content + b"x")
    assert weights_fingerprint([path], []) != before
