"""Names for cached state: what must be equal for two runs to share KV blocks, as hashes.

Owns the key chain and the fingerprints. Every input that could change a block's numbers must be in one of them; the caller says
which inputs those are. Must not know models, MLX or where blocks are stored.
"""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

KV_FORMAT = 1  # raise it when the block file, the tree or the meaning of a tensor changes: all older blocks become strays

_PAGE_BYTES = 4096
_PAGES_PER_FILE = 256  # 650 GB in 130 shards are then 33k reads, 2–3 s cold, of a load that takes minutes
_HEADER_MAX_BYTES = 64 << 20


def namespace_root(tag: str, fingerprint: str, layout: str, cache_salt: str = "") -> bytes:
    """The hash before the first block. `cache_salt` separates principals that must not probe each other's prefixes."""
    # A salt comes from a client's JSON and may hold lone surrogates.
    return _digest(part.encode("utf-8", "surrogatepass") for part in (tag, fingerprint, layout, cache_salt))


def chain(root: bytes, tokens: Sequence[int], block_tokens: int, extras: Sequence[bytes] = ()) -> list[bytes]:
    """One hash per full block: h_i = sha256(h_{i-1} | extra_i | uint32le tokens). An unfilled tail has none.

    `root` may be the hash of an earlier block: the chain then goes on from there. `extras[i]` names what the tokens of block i
    do not say (ids of images); the fixed sizes of its neighbours delimit it.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    packed = pack_tokens(tokens)
    hashes: list[bytes] = []
    step = 4 * block_tokens
    for index, end in enumerate(range(step, len(packed) + 1, step)):
        extra = extras[index] if index < len(extras) else b""
        root = sha256(b"".join((root, extra, packed[end - step : end]))).digest()
        hashes.append(root)
    return hashes


def block_key(block_hash: bytes) -> str:
    """The key of a block's rows."""
    return block_hash.hex()


def snapshot_key(block_hash: bytes) -> str:
    """The key of the state that cannot be sliced (recurrent layers), as it is at the end of this block."""
    return block_hash.hex() + "s"


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as uint32le. struct.error for an id that is none."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def layout_id(parts: Iterable[bytes]) -> str:
    """Hash over what shapes a block: leaf paths and kinds, window and array counts, block size, codec, world size."""
    return _digest(parts).hex()


def weights_fingerprint(files: Sequence[Path], parts: Sequence[bytes]) -> str:
    """Identity of the numbers a model computes with: `parts` (sources, config, overrides) and a sample of every weight file.

    Per file: name, size, safetensors header and one page from the middle of each tensor (up to 256), so weights that were
    re-quantised or fine-tuned under the same name get another fingerprint without reading them whole. The place on disk and the
    times do not count: a copied model keeps its cache. Raises OSError when a file cannot be read.
    """
    samples = [_sample(path) for path in sorted(files, key=lambda path: (path.name, path))]
    return _digest([str(KV_FORMAT).encode(), str(len(parts)).encode(), *parts, *samples]).hex()


def _sample(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _safetensors_header(file, size)
        offsets = _page_offsets(header, size)
        pages = [os.pread(file.fileno(), _PAGE_BYTES, offset) for offset in offsets]
    return _digest([os.fsencode(path.name), str(size).encode(), header, *pages])


def _safetensors_header(file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    return file.read(length) if length <= min(size - 8, _HEADER_MAX_BYTES) else b""


def _page_offsets(header: bytes, size: int) -> list[int]:
    """The middle of each tensor; for what is no safetensors file, pages spread evenly over it."""
    middles = sorted(_tensor_middles(header)) or list(range(0, size, max(_PAGE_BYTES, -(-size // _PAGES_PER_FILE))))
    stride = -(-len(middles) // _PAGES_PER_FILE) or 1
    return middles[::stride]


def _tensor_middles(header: bytes) -> Iterable[int]:
    try:
        described = cast("object", json.loads(header))
    except (ValueError, RecursionError):
        return
    if not isinstance(described, dict):
        return
    for tensor in cast("dict[str, object]", described).values():
        span = cast("dict[str, object]", tensor).get("data_offsets") if isinstance(tensor, dict) else None
        match span:
            case [int(begin), int(end)] if 0 <= begin < end:
                yield 8 + len(header) + max(begin, (begin + end - _PAGE_BYTES) // 2)
            case _:
                pass


def _digest(parts: Iterable[bytes]) -> bytes:
    """Each part is preceded by its length, so that no two lists of parts read the same."""
    hasher = sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
