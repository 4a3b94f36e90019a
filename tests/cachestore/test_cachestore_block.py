import json
import math
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from cachestore.block import ITEM_BYTES, BadBlock, BadReason, Block, BlockId, Tensor, decode, encode, file_bytes, identify
from tests.cachestore.cachestore_stand import make_block, make_chain

FIRST, SECOND = make_chain(2)
FILE = b"".join(encode(make_block(FIRST)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name not in ("tokens", "__metadata__"))
blocks = st.builds(
    Block,
    st.builds(
        BlockId,
        st.text(st.sampled_from("0123456789abcdef"), min_size=64, max_size=64),
        st.binary(min_size=32, max_size=32),
        st.integers(0, 2**40),
        st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    ),
    st.dictionaries(names, tensors(), max_size=5),
)


@given(blocks)
def test_what_was_encoded_is_decoded(block: Block) -> None:
    decoded = decode(b"".join(encode(block)), block.id)
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in decoded.items()} == {
        n: (t.dtype, t.shape, bytes(t.data)) for n, t in block.tensors.items()
    }


def test_any_safetensors_reader_can_open_a_block(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(FILE)
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"keys", "odd", "tokens"}
        assert file.get_tensor("tokens").tolist() == list(FIRST.tokens)
        assert np.array_equal(file.get_tensor("keys"), np.arange(32, dtype=np.float32).reshape(1, 32))
        assert file.metadata()["parent"] == FIRST.parent.hex()


def test_the_payload_is_not_copied() -> None:
    big = memoryview(bytearray(1 << 20))
    buffers = encode(Block(FIRST, {"keys": Tensor("U8", (1 << 20,), big)}))
    assert any(buffer is big for buffer in buffers)
    data = b"".join(buffers)
    assert memoryview(decode(data, FIRST)["keys"].data).obj is data


def test_a_flipped_byte_anywhere_is_a_bad_block() -> None:
    for at in range(len(FILE)):
        for flip in (0x01, 0x20, 0x0F, 0xFF):
            with pytest.raises(BadBlock):
                decode(FILE[:at] + bytes([FILE[at] ^ flip]) + FILE[at + 1 :], FIRST)


def test_a_truncated_file_is_a_bad_block() -> None:
    for length in range(len(FILE)):
        with pytest.raises(BadBlock):
            decode(FILE[:length], FIRST)


def test_bytes_too_many_are_a_bad_block() -> None:
    with pytest.raises(BadBlock) as caught:
        decode(FILE + b"\0", FIRST)
    assert caught.value.reason is BadReason.LENGTH


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_a_bad_block(data: bytes, plausible: bool) -> None:
    head = b'{"__metadata__":{"crc32":"' + data
    with pytest.raises(BadBlock):
        decode(len(head).to_bytes(8, "little") + head if plausible else data, FIRST)


MALICIOUS = ["[" * 50_000, '{"a":' * 50_000, "}", '00000000"},"__metadata__":3}', '00000000"},"k":{"shape":[true]}}']


@pytest.mark.parametrize("header", MALICIOUS)
def test_a_malicious_header_is_a_bad_block(header: str) -> None:
    head = b'{"__metadata__":{"crc32":"' + header.encode()
    with pytest.raises(BadBlock):
        decode(len(head).to_bytes(8, "little") + head, FIRST)


@pytest.mark.parametrize(
    "other",
    [
        SECOND,
        replace(FIRST, parent=SECOND.parent),
        replace(FIRST, start=4),
        replace(FIRST, key=FIRST.key + "s"),
        replace(FIRST, tokens=FIRST.tokens[:-1]),
    ],
)
def test_a_block_of_another_place_is_refused(other: BlockId) -> None:
    with pytest.raises(BadBlock) as caught:
        decode(FILE, other)
    assert caught.value.reason is BadReason.IDENTITY


def test_equal_places_with_other_tokens_are_refused() -> None:
    with pytest.raises(BadBlock) as caught:
        decode(FILE, replace(FIRST, tokens=(9, 9, 9, 9)))
    assert caught.value.reason is BadReason.TOKENS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keys": {"shape": [1, 31]}}, BadReason.TENSORS),
        ({"keys": {"dtype": "F12"}}, BadReason.TENSORS),
        ({"keys": {"data_offsets": [4, 128]}}, BadReason.TENSORS),
        ({"keys": {"shape": [-1, -32]}}, BadReason.TENSORS),
        ({"keys": {"shape": "1,32"}}, BadReason.HEADER),
        ({"tokens": {"dtype": "I32"}}, BadReason.TOKENS),
        ({"__metadata__": {"format": "omlxd-kv-0"}}, BadReason.FORMAT),
        ({"__metadata__": {"surplus": "x"}}, BadReason.IDENTITY),
    ],
)
def test_a_file_whose_checksum_holds_is_still_checked(change: dict[str, dict[str, object]], reason: BadReason) -> None:
    with pytest.raises(BadBlock) as caught:
        decode(forge(change), FIRST)
    assert caught.value.reason is reason


def forge(change: dict[str, dict[str, object]]) -> bytes:
    """The first block with another header and a checksum that fits it: the work of another program, not of a broken disk."""
    size = int.from_bytes(FILE[:8], "little")
    described = json.loads(FILE[8 : 8 + size])
    for name, fields in change.items():
        described[name].update(fields)
    described["__metadata__"]["crc32"] = "00000000"
    header = json.dumps(described, separators=(",", ":")).encode()
    checksum = crc32(header + FILE[8 + size :])
    header = header.replace(b"00000000", b"%08x" % checksum, 1)
    return len(header).to_bytes(8, "little") + header + FILE[8 + size :]


@pytest.mark.parametrize(("dtype", "shape", "size"), [("F32", (2,), 4), ("F99", (1,), 4), ("U8", (-1,), 1), ("U8", (), 0)])
def test_a_tensor_whose_bytes_do_not_fit_cannot_be_made(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match="no"):
        Tensor(dtype, shape, bytes(size))


def test_the_names_of_our_own_parts_are_taken() -> None:
    with pytest.raises(ValueError, match="tokens"):
        Block(FIRST, {"tokens": Tensor("U8", (0,), b"")})


@pytest.mark.parametrize("floats", [1, 32, 5000])
def test_the_length_of_the_file_is_known_before_it_is_encoded(floats: int) -> None:
    for block_id in make_chain(3):
        block = make_block(block_id, floats=floats)
        assert file_bytes(block) == sum(len(part) for part in encode(block))


def test_a_block_file_says_which_block_it_is() -> None:
    block_id = make_chain(3)[2]
    assert identify(b"".join(encode(make_block(block_id)))) == block_id
