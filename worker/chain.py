"""The names of one sequence's KV blocks, grown as tokens come: each name covers everything before it.

Pure: tokens in, keys out. Must not know where blocks are kept.
"""

from collections.abc import Sequence
from hashlib import sha256

from cachestore.block import BlockId
from cachestore.keys import block_key, chain, pack_tokens, snapshot_key


class Chain:
    def __init__(self, root: bytes, block_tokens: int) -> None:
        self.captured = 0
        """Blocks that need no more attention: restored or copied out of the batch."""
        self.tail_captured = False
        self.snapshot_tokens = 0
        """How long the longest beginning is whose state is kept: only of use to models that have one."""
        self.branch_tokens = 0
        """Where this prompt leaves another's blocks with no snapshot at hand: a place worth one. 0 where there is none."""
        self._block_tokens = block_tokens
        self._hashes = [root]
        self._keys: list[str] = []

    @property
    def root(self) -> bytes:
        """Chains of another namespace or salt have another."""
        return self._hashes[0]

    def forget_kept(self) -> None:
        """Its sequence was put aside: until a restore has found them, what was kept of it may be gone."""
        self.captured = self.snapshot_tokens = 0

    def grow(self, tokens: Sequence[int], length: int) -> int:
        """Names the full blocks among the first `length` tokens; returns how many there are."""
        blocks = length // self._block_tokens
        known = len(self._hashes) - 1
        if blocks > known:
            new = tokens[known * self._block_tokens : blocks * self._block_tokens]
            hashes = chain(self._hashes[-1], new, self._block_tokens)
            self._hashes += hashes
            self._keys += map(block_key, hashes)
        return blocks

    def keys(self, blocks: int) -> list[str]:
        """Of the first `blocks`, root first."""
        return self._keys[:blocks]

    def block(self, index: int, tokens: Sequence[int]) -> BlockId:
        start = index * self._block_tokens
        own = tuple(tokens[start : start + self._block_tokens])
        return BlockId(self._keys[index], self._hashes[index], start, own)

    def snapshot(self, index: int, tokens: Sequence[int]) -> BlockId:
        """The state at the end of that block: named by all tokens up to there, like the block itself."""
        block = self.block(index, tokens)
        return BlockId(snapshot_key(self._hashes[index + 1]), block.parent, block.start, block.tokens)

    def tail(self, tokens: Sequence[int], end: int) -> BlockId:
        """What lies between the last full block and `end`, under a name no full block can have."""
        index = end // self._block_tokens
        own = tuple(tokens[index * self._block_tokens : end])
        digest = sha256(self._hashes[index] + b"tail" + pack_tokens(own)).hexdigest()
        return BlockId(f"{digest}t", self._hashes[index], index * self._block_tokens, own)
