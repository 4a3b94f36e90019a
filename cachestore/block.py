"""One block as bytes: a valid safetensors file that also says who it is and carries its tokens and a checksum.

Owns the encoding and every check that decides whether bytes may be trusted: a block is whole and the one asked for, or it is a
`BadBlock`. Must not know files, models or array libraries: bf16 has no numpy type, so tensors cross as bytes with a dtype name.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast
from zlib import crc32

from cachestore.keys import KV_FORMAT, pack_tokens

Buffer = bytes | memoryview

ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
TOKENS = "tokens"

_FORMAT = f"omlxd-kv-{KV_FORMAT}"
# The checksum covers the header as well, with these digits in its own place: a flipped byte in a dtype or a name is damage too.
_HEAD = b'{"__metadata__":{"crc32":"'
_NO_CRC = b"00000000"
_HEADER_MAX_BYTES = 1 << 20


class BadReason(StrEnum):
    HEADER = "header"
    FORMAT = "format"
    LENGTH = "length"
    CHECKSUM = "checksum"
    TENSORS = "tensors"
    IDENTITY = "identity"
    TOKENS = "tokens"


class BadBlock(Exception):
    """These bytes are not the block that was asked for, whole and unharmed."""

    def __init__(self, reason: BadReason) -> None:
        super().__init__(reason)
        self.reason: Final = reason


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dtype` is the safetensors name ("F32", "BF16"); `data` is contiguous, little-endian, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0 or self.nbytes != math.prod(self.shape) * ITEM_BYTES.get(self.dtype, -1):
            raise ValueError(f"{self.nbytes} bytes are no {self.dtype} tensor of shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@dataclass(frozen=True, slots=True)
class BlockId:
    """Which block: its key, the hash before it in the chain, the position of its first token, and its tokens."""

    key: str
    parent: bytes
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    id: BlockId
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if TOKENS in self.tensors or "__metadata__" in self.tensors:
            raise ValueError("a block's own tensors may not be named tokens or __metadata__")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 4 * len(self.id.tokens)


def encode(block: Block) -> list[Buffer]:
    """The file as buffers to be written one after another; the payload is not copied."""
    tokens = Tensor("U32", (len(block.id.tokens),), pack_tokens(block.id.tokens))
    tensors = _in_file_order([*block.tensors.items(), (TOKENS, tokens)])
    payload = [tensor.data for _, tensor in tensors]
    header = _header(block.id, tensors)
    checksum = _checksum(header, payload)
    return [len(header).to_bytes(8, "little"), header.replace(_HEAD + _NO_CRC, _HEAD + checksum, 1), *payload]


def decode(data: bytes, expected: BlockId) -> Mapping[str, Tensor]:
    """The block's tensors, as views into `data`. All or nothing: raises BadBlock, and nothing else, on any doubt."""
    begin = _payload_begin(data)
    head = data[8:begin]
    payload = memoryview(data)[begin:]
    metadata, spans = _parse(head)
    if metadata.get("format") != _FORMAT:
        raise BadBlock(BadReason.FORMAT)
    if max((span.end for span in spans.values()), default=0) != len(payload):
        raise BadBlock(BadReason.LENGTH)
    checksum_at = slice(len(_HEAD), len(_HEAD) + len(_NO_CRC))
    if head[checksum_at] != _checksum(_HEAD + _NO_CRC + head[checksum_at.stop :], [payload]):
        raise BadBlock(BadReason.CHECKSUM)
    if metadata != {"crc32": head[checksum_at].decode("ascii", "replace"), **_identity(expected)}:
        raise BadBlock(BadReason.IDENTITY)
    tensors = _tensors(spans, payload)
    tokens = tensors.pop(TOKENS, None)
    if tokens is None or tokens.dtype != "U32" or tokens.data != pack_tokens(expected.tokens):
        raise BadBlock(BadReason.TOKENS)
    return tensors


def identify(data: bytes) -> BlockId:
    """Which block these bytes say they are; whether that is so, `decode` finds out. Raises BadBlock."""
    return identify_from(lambda offset, size: data[offset : offset + size])


def identify_from(read: Callable[[int, int], bytes]) -> BlockId:
    """As `identify`, from header and tokens alone: `read` returns up to that many bytes from an offset on. Raises BadBlock."""
    head = read(0, 8)
    header_bytes = int.from_bytes(head, "little")
    if len(head) == 8 and header_bytes <= _HEADER_MAX_BYTES:
        head += read(8, header_bytes)
    begin = 8 + header_bytes
    if len(head) < max(8, begin):
        raise BadBlock(BadReason.LENGTH)
    metadata, spans = _parse(head[8:])
    span = spans.get(TOKENS)
    match metadata:
        case {"key": str(key), "parent": str(parent), "start": str(start), "token_count": str(count)} if (
            span is not None and 0 <= span.begin <= span.end <= span.begin + _HEADER_MAX_BYTES
        ):
            packed = read(begin + span.begin, span.end - span.begin)
        case _:
            raise BadBlock(BadReason.HEADER)
    try:
        tokens = struct.unpack(f"<{int(count)}I", packed)
        return BlockId(key, bytes.fromhex(parent), int(start), tokens)
    except (ValueError, struct.error, OverflowError):
        raise BadBlock(BadReason.HEADER) from None


def file_bytes(block: Block) -> int:
    """How long the block's file is."""
    tensors = [*block.tensors.items(), (TOKENS, Tensor("U32", (len(block.id.tokens),), bytes(4 * len(block.id.tokens))))]
    return 8 + len(_header(block.id, _in_file_order(tensors))) + block.nbytes


@dataclass(frozen=True, slots=True)
class _Span:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _payload_begin(data: bytes) -> int:
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > _HEADER_MAX_BYTES or 8 + header_bytes > len(data):
        raise BadBlock(BadReason.LENGTH)
    return 8 + header_bytes


def _in_file_order(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Wide items first, as safetensors itself does: every tensor then starts aligned."""
    return sorted(tensors, key=lambda item: -ITEM_BYTES[item[1].dtype])


def _header(block_id: BlockId, tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"crc32": _NO_CRC.decode(), **_identity(block_id)}}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.nbytes
        described[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    header = json.dumps(described, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _identity(block_id: BlockId) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "key": block_id.key,
        "parent": block_id.parent.hex(),
        "start": str(block_id.start),
        "token_count": str(len(block_id.tokens)),
    }


def _checksum(header: bytes, payload: Sequence[Buffer]) -> bytes:
    crc = crc32(header)
    for part in payload:
        crc = crc32(part, crc)
    return b"%08x" % crc


def _parse(head: bytes) -> tuple[dict[str, object], dict[str, _Span]]:
    if not head.startswith(_HEAD):
        raise BadBlock(BadReason.HEADER)
    try:
        described = cast("dict[str, dict[str, object]]", json.loads(head))  # an object, as it starts like one
    except (ValueError, RecursionError):
        raise BadBlock(BadReason.HEADER) from None
    metadata = described.pop("__metadata__")
    # A second "__metadata__" would have replaced the first, which alone is known to be an object.
    if not isinstance(cast("object", metadata), dict):
        raise BadBlock(BadReason.HEADER)
    return metadata, {name: _span(entry) for name, entry in described.items()}


def _span(entry: object) -> _Span:
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _integers(fields.get("shape")), _integers(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise BadBlock(BadReason.HEADER)
    return _Span(dtype, shape, *offsets)


def _integers(value: object) -> tuple[int, ...] | None:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    integers = tuple(item for item in items if type(item) is int)
    return integers if len(integers) == len(items) else None


def _tensors(spans: Mapping[str, _Span], payload: memoryview) -> dict[str, Tensor]:
    """The spans must lie end to end: no holes, no overlaps."""
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != offset or span.end < offset:
            raise BadBlock(BadReason.TENSORS)
        try:
            tensors[name] = Tensor(span.dtype, span.shape, payload[span.begin : span.end])
        except ValueError:
            raise BadBlock(BadReason.TENSORS) from None
        offset = span.end
    return tensors
