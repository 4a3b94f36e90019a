"""One prompt's prefix on its way from the tiers into a cache, a slice at a time.

The first block that is missing or not what it should be ends the prefix there; where layers keep state it ends at the last
snapshot before. Runs on the engine thread, between two steps; must not know requests or lanes.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cachestore.block import Block, BlockId, Tensor
from worker.chain import Chain
from worker.kv_assembly import Assembly, roomy
from worker.mlx_types import Cache
from worker.prefix import Found, PrefixCache, Tier


@dataclass(frozen=True, slots=True)
class Restored:
    """`cache` is None where nothing was found."""

    cache: Cache | None = None
    hot_tokens: int = 0
    cold_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.hot_tokens + self.cold_tokens


class Restore:
    def __init__(self, prefix: PrefixCache, chain: Chain, prompt: Sequence[int]) -> None:
        self._prefix = prefix
        self._chain = chain
        self._prompt = prompt
        self._block_tokens = prefix.block_tokens
        self._tiers: list[Tier] = []
        """Where each block that was added came from."""
        self._tail_tokens = 0
        self._assembly: Assembly | None = None
        self._work = self._run()

    def advance(self, until: float) -> Restored | None:
        """Goes on until the clock passes `until`; the outcome once it is complete."""
        for _ in self._work:
            if time.monotonic() >= until:
                return None
        hot_tokens = self._tiers.count("hot") * self._block_tokens + self._tail_tokens
        cold_tokens = self._tiers.count("cold") * self._block_tokens
        self._prefix.count(len(self._prompt), hot_tokens, cold_tokens)
        if self._assembly is None or not self._assembly.tokens:
            return Restored()
        return Restored(self._assembly.cache(self._prefix.new_cache()), hot_tokens, cold_tokens)

    def _run(self) -> Iterator[None]:
        found = self._prefix.look(self._chain, self._prompt)
        self._prefix.count_gap(self._chain, self._prompt, len(found.tiers))
        capacity = found.usable_blocks * self._block_tokens + (0 if found.tail is None else len(found.tail.tokens))
        if not capacity:
            self._note_branch(found, 0)
            return
        self._assembly = assembly = Assembly(self._prefix.layout, roomy(capacity, len(self._prompt)), self._block_tokens)
        while assembly.allocate_one():
            yield
        blocks, tail = yield from self._collect(assembly, found)
        if tail is None and blocks * self._block_tokens < self._prefix.least_tokens:
            blocks = 0  # some of what seemed to be there was damaged
        del self._tiers[blocks:]
        assembly.cut_back(blocks * self._block_tokens)
        if tail is not None:
            assembly.add(tail, len(self._prompt) - 1 - assembly.tokens)
            self._tail_tokens = assembly.tokens - blocks * self._block_tokens
        else:
            self._note_branch(found, blocks)
        self._touch(blocks)
        while assembly.tokens and assembly.convert_one():
            yield

    def _collect(self, assembly: Assembly, found: Found) -> Generator[None, None, tuple[int, Mapping[str, Tensor] | None]]:
        """Adds all that can be restored together; returns how many blocks that is, and the tail if it is part of it."""
        tail = None if found.tail is None else self._prefix.hot.get(found.tail)
        if tail is not None and assembly.add_state(tail):
            yield from self._add_rows(assembly, found.usable_blocks, "hot")
            if len(self._tiers) == found.usable_blocks:
                return found.usable_blocks, tail
        limit = found.usable_blocks
        while True:
            blocks, tier = self._add_state(assembly, limit)
            yield
            yield from self._add_rows(assembly, blocks, tier)
            if len(self._tiers) >= blocks:
                return blocks, None
            limit = len(self._tiers)

    def _add_state(self, assembly: Assembly, limit: int) -> tuple[int, Tier]:
        """The largest number of blocks, up to `limit`, after which a sequence can go on: its state is added, from that tier."""
        if not self._prefix.layout.has_state:
            return limit, "hot"
        for blocks in range(limit, 0, -1):
            wanted = self._chain.snapshot(blocks - 1, self._prompt)
            if self._prefix.tier_of(wanted.key) is None:
                continue
            tensors, tier = self._find(wanted)
            if tensors is not None and assembly.add_state(tensors):
                self._keep_where_missing(Block(wanted, tensors), tier, follows_own_rows=True)
                return blocks, tier
        return 0, "hot"

    def _add_rows(self, assembly: Assembly, blocks: int, state_tier: Tier) -> Iterator[None]:
        """Up to that many blocks, or to the first that is missing or bad."""
        if not self._prefix.layout.has_rows:  # the state alone says all of them
            assembly.skip(blocks * self._block_tokens)
            self._tiers = [state_tier] * blocks
            return
        is_whole = True
        for index in range(len(self._tiers), blocks):
            wanted = self._chain.block(index, self._prompt)
            if is_whole:
                tensors, tier = self._find(wanted)
                is_whole = tensors is not None and assembly.add(tensors, len(wanted.tokens))
                if is_whole and tensors is not None:
                    self._tiers.append(tier)
                    self._keep_where_missing(Block(wanted, tensors), tier)
            else:  # reading sets damaged ones aside, and what is set aside this prefill will write anew
                self._prefix.find(wanted)
            yield

    def _find(self, wanted: BlockId) -> tuple[Mapping[str, Tensor] | None, Tier]:
        tensors, is_cold = self._prefix.find(wanted)
        return tensors, "cold" if is_cold else "hot"

    def _keep_where_missing(self, block: Block, tier: Tier, *, follows_own_rows: bool = False) -> None:
        if tier == "cold":
            self._prefix.keep(self._chain, block, follows_own_rows=follows_own_rows)
        else:  # its write may have been dropped, or the janitor was here since
            self._prefix.write_through(block)

    def _note_branch(self, found: Found, blocks: int) -> None:
        """Others had these rows too: where they part is a place that more prompts will come by."""
        self._chain.snapshot_tokens = blocks * self._block_tokens
        if self._prefix.layout.has_state and self._prefix.layout.has_rows and len(found.tiers) > blocks:
            self._chain.branch_tokens = len(found.tiers) * self._block_tokens

    def _touch(self, blocks: int) -> None:
        self._chain.captured = blocks
        keys = self._chain.keys(blocks)
        if self._prefix.layout.has_state and blocks:
            keys.append(self._chain.snapshot(blocks - 1, self._prompt).key)
        self._prefix.touch(keys)
