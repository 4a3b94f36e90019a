"""Chains, blocks and a clock for the tests of the block store, also for the writer processes they start."""

import struct
from pathlib import Path

from cachestore.block import Block, BlockId, Tensor
from cachestore.keys import block_key, chain, namespace_root
from cachestore.store import Namespace

BLOCK_TOKENS = 4


def make_chain(blocks: int, *, salt: str = "", tokens: list[int] | None = None) -> list[BlockId]:
    """The ids of a prompt's full blocks, root first."""
    tokens = tokens if tokens is not None else list(range(blocks * BLOCK_TOKENS))
    root = namespace_root("test", "f" * 64, "1" * 64, salt)
    hashes = chain(root, tokens, BLOCK_TOKENS)
    parents = [root, *hashes]
    starts = range(0, len(hashes) * BLOCK_TOKENS, BLOCK_TOKENS)
    return [
        BlockId(block_key(own), parent, start, tuple(tokens[start : start + BLOCK_TOKENS]))
        for own, parent, start in zip(hashes, parents, starts, strict=False)
    ]


def make_block(block_id: BlockId, *, floats: int = 32) -> Block:
    """Its numbers follow from its place, so a test can tell whose they are."""
    rows = struct.pack(f"<{floats}f", *(block_id.start + n for n in range(floats)))
    return Block(block_id, {"keys": Tensor("F32", (1, floats), rows), "odd": Tensor("BF16", (3,), b"\x01\x02" * 3)})


def make_namespace() -> Namespace:
    return Namespace("org/model", "f" * 64, "1" * 64, BLOCK_TOKENS)


def files_below(root: Path, pattern: str = "*") -> list[Path]:
    return [path for path in root.rglob(pattern) if path.is_file()]


def block_file(root: Path, block_id: BlockId) -> Path:
    [path] = root.rglob(f"{block_id.key}.safetensors")
    return path


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
