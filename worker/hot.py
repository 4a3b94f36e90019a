"""The RAM tier of the prefix cache: blocks as bytes under a byte limit, least recently used first out.

A chain is worth nothing without its root, so a chain is touched leaf first and root last, and a new block never pushes out the
blocks before it. Every hit is checked against its tokens. Engine thread only; must not know MLX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachestore.block import Block, BlockId, Tensor

ENDS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class HotCounters:
    hits: int
    evicted: int
    refused: int


class HotTier:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._blocks: dict[str, Block] = {}  # oldest first
        self._hits = self._evicted = self._refused = 0
        self._may_fill = True
        self._ends: set[str] = set()
        """Blocks that were refused since room was last made: what follows them is refused without another look."""

    @property
    def is_on(self) -> bool:
        return self._limit_bytes > 0

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def counters(self) -> HotCounters:
        return HotCounters(self._hits, self._evicted, self._refused)

    def contains(self, key: str) -> bool:
        return key in self._blocks

    def get(self, wanted: BlockId) -> Mapping[str, Tensor] | None:
        block = self._blocks.get(wanted.key)
        if block is None or block.id != wanted:
            return None
        self._hits += 1
        return block.tensors

    def touch(self, chain: Sequence[str]) -> int:
        """Marks a chain, given root first, as just used. Returns how many of it are here."""
        present = 0
        for key in reversed(chain):
            block = self._blocks.pop(key, None)
            if block is not None:
                self._blocks[key] = block
                present += 1
        return present

    def put(self, block: Block, before: Sequence[str]) -> bool:
        """Keeps `block`, which follows the chain `before`; False where there is no room without breaking that chain."""
        if block.id.key in self._blocks:
            return True
        if block.nbytes > self._limit_bytes or (before and before[-1] in self._ends):
            return self._refuse(block)
        if self._bytes + block.nbytes > self._limit_bytes:
            self._shrink(self._limit_bytes - block.nbytes, keep_newest=self.touch(before))
        if self._bytes + block.nbytes > self._limit_bytes:
            return self._refuse(block)
        self._ends.discard(block.id.key)
        self._blocks[block.id.key] = block
        self._bytes += block.nbytes
        return True

    def fill(self, blocks: Sequence[Block]) -> None:
        """Puts in what was used before all that is here, latest first, as long as nothing has to go for it.

        Once something had to go, no more is taken: a chain would come to lack its middle.
        """
        taken: list[Block] = []
        for block in blocks:
            self._may_fill = self._may_fill and self._bytes + block.nbytes <= self._limit_bytes
            if not self._may_fill:
                break
            if block.id.key not in self._blocks:
                taken.append(block)
                self._bytes += block.nbytes
        self._blocks = {block.id.key: block for block in reversed(taken)} | self._blocks

    def resize(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._ends.clear()
        self._shrink(limit_bytes)

    def free(self, target_bytes: int) -> None:
        """Gives back that much now; the limit stays."""
        self._ends.clear()
        self._shrink(max(0, self._bytes - target_bytes))

    def _refuse(self, block: Block) -> bool:
        self._refused += 1
        if len(self._ends) < ENDS_MAX:
            self._ends.add(block.id.key)
        return False

    def _shrink(self, to_bytes: int, keep_newest: int = 0) -> None:
        while self._bytes > to_bytes and len(self._blocks) > keep_newest:
            block = self._blocks.pop(next(iter(self._blocks)))
            self._bytes -= block.nbytes
            self._evicted += 1
            self._may_fill = False
