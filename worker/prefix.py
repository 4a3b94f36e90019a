"""The prefix cache of one model: finds blocks in RAM, in the write queue and on disk, and copies new ones out of the batch.

Any doubt about a block is a miss, and a miss ends the chain there. Runs on the engine thread; must not know requests, only
tokens. The cache may make an answer faster, never different.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cachestore.block import Block, BlockId, Tensor
from cachestore.keys import namespace_root
from cachestore.store import Namespace
from worker.chain import Chain
from worker.hot import HotTier
from worker.kv import Layout
from worker.lanes import Held
from worker.mlx_types import Cache
from worker.snapshots import Snapshots
from worker.spill import Spill

KEY_TAG = "text"
Tier = Literal["hot", "cold"]


@dataclass(frozen=True, slots=True)
class Found:
    """What there seems to be of a prompt. `tiers` has one entry per block whose rows are there, without a gap."""

    tiers: tuple[Tier, ...]
    usable_blocks: int
    """As many can be restored: where layers keep state, the last of them has a snapshot."""
    tail: BlockId | None
    """In RAM, and follows the last block."""


class PrefixCache:
    def __init__(
        self,
        namespace: Namespace,
        layout: Layout,
        hot: HotTier,
        spill: Spill | None,
        new_cache: Callable[[], Cache],
        least_tokens: int = 0,
    ) -> None:
        """Rows are those of this layout only once a sequence has `least_tokens`: fewer are neither kept nor found."""
        self.asked_tokens = self.hot_tokens = self.cold_tokens = 0
        self._gaps = 0
        self.namespace = namespace
        self.layout = layout
        self.hot = hot
        self.spill = spill
        self.new_cache = new_cache
        self.least_tokens = least_tokens
        self.block_tokens = namespace.block_tokens
        self._snapshots = Snapshots(layout, self.block_tokens, lambda key: not self._lacks(key))

    def new_chain(self, cache_salt: str) -> Chain:
        root = namespace_root(KEY_TAG, self.namespace.fingerprint, self.namespace.layout, cache_salt)
        return Chain(root, self.block_tokens)

    def probe(self, chain: Chain, prompt: Sequence[int]) -> tuple[int, int]:
        """Tokens that a restore would likely find, in RAM and on disk. Reads no block."""
        found = self.look(chain, prompt)
        used = found.tiers[: found.usable_blocks]
        tail_tokens = 0 if found.tail is None else len(found.tail.tokens)
        return used.count("hot") * self.block_tokens + tail_tokens, used.count("cold") * self.block_tokens

    def look(self, chain: Chain, prompt: Sequence[int]) -> Found:
        """Reads no block."""
        last = len(prompt) - 1
        blocks = chain.grow(prompt, last)
        tiers = tuple(self._tiers(chain, blocks))
        tail = chain.tail(prompt, last)
        if last < self.least_tokens:
            return Found(tiers, 0, None)
        if len(tiers) == blocks and tail.tokens and self.hot.contains(tail.key):
            return Found(tiers, blocks, tail)
        if not self.layout.has_state:
            return Found(tiers, self._enough(len(tiers)), None)
        usable = next((n for n in range(len(tiers), 0, -1) if self.tier_of(chain.snapshot(n - 1, prompt).key)), 0)
        if not self.layout.has_rows and usable:
            tiers = (self.tier_of(chain.snapshot(usable - 1, prompt).key) or "cold",) * usable
        return Found(tiers, self._enough(usable), None)

    def _enough(self, blocks: int) -> int:
        return blocks if blocks * self.block_tokens >= self.least_tokens else 0

    def tier_of(self, key: str) -> Tier | None:
        if self.hot.contains(key) or (self.spill is not None and self.spill.is_pending(key)):
            return "hot"
        return "cold" if self.spill is not None and self.spill.contains(key) else None

    def find(self, wanted: BlockId) -> tuple[Mapping[str, Tensor] | None, bool]:
        """The block's tensors or None, and whether they came from disk."""
        tensors = self.hot.get(wanted)
        if tensors is None and self.spill is not None:
            tensors = self.spill.get_pending(wanted)
            if tensors is None:
                return self.spill.get(wanted), True
        return tensors, False

    def capture(self, chain: Chain, held: Held, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Call right after a step: keeps the blocks it completed, and the tail of a prompt that is all in.

        The tail serves an immediate repeat, which then computes one token instead of up to a block.
        """
        if held.tokens < self.least_tokens:
            return
        if self.layout.has_rows:
            self._keep_rows(chain, held, list(self._completed(chain, held, tokens)))
        if self.layout.has_state:
            snapshot = self._snapshots.take(chain, held, tokens, prompt_tokens)
            if snapshot is not None:
                self.keep(chain, snapshot, follows_own_rows=True)
        if not chain.tail_captured and held.tokens >= prompt_tokens - 1 >= self.least_tokens:
            chain.tail_captured = True
            self._keep_tail(chain, held, tokens, prompt_tokens - 1)

    def leave(self, chain: Chain) -> None:
        """Call when a sequence is over, for whatever reason."""
        snapshot = self._snapshots.leave(chain)
        keys = chain.keys(chain.captured)
        if snapshot is not None:
            self.keep(chain, snapshot, follows_own_rows=True)
            keys.append(snapshot.id.key)
        self.touch(keys)

    def touch(self, keys: Sequence[str]) -> None:
        """Marks a chain, given root first, as just used in both tiers."""
        self.hot.touch(keys)
        if keys and self.spill is not None:
            self.spill.touch(keys)

    def keep(self, chain: Chain, block: Block, *, follows_own_rows: bool = False) -> None:
        """A block of this chain, its tail, or a snapshot in it, which comes after the rows of its block."""
        index = block.id.start // self.block_tokens
        self.hot.put(block, chain.keys(index + follows_own_rows))
        if len(block.id.tokens) == self.block_tokens:
            self.write_through(block)

    def write_through(self, block: Block) -> None:
        if self.spill is not None and not self.spill.contains(block.id.key):
            self.spill.put(block)

    def count(self, asked_tokens: int, hot_tokens: int, cold_tokens: int) -> None:
        self.asked_tokens += asked_tokens
        self.hot_tokens += hot_tokens
        self.cold_tokens += cold_tokens

    def count_gap(self, chain: Chain, prompt: Sequence[int], present: int) -> None:
        """A chain that ends while its block after the next is there has lost one: damage, not a prompt that is new."""
        keys = chain.keys(chain.grow(prompt, len(prompt) - 1))
        if self.layout.has_rows and present + 1 < len(keys) and self.tier_of(keys[present + 1]):
            self._gaps += 1

    def counters(self) -> dict[str, int]:
        own = {"asked_tokens": self.asked_tokens, "hot_tokens": self.hot_tokens, "cold_tokens": self.cold_tokens}
        own["miss_gap"] = self._gaps
        hot = self.hot.counters
        own |= {"hot_hits": hot.hits, "hot_evicted": hot.evicted, "hot_refused": hot.refused}
        return own | (self.spill.counters() if self.spill is not None else {})

    def _tiers(self, chain: Chain, blocks: int) -> Iterator[Tier]:
        if not self.layout.has_rows:  # nothing but snapshots is kept, so no block is missing
            yield from ("hot",) * blocks
            return
        for key in chain.keys(blocks):
            tier = self.tier_of(key)
            if tier is None:
                return
            yield tier

    def _completed(self, chain: Chain, held: Held, tokens: Sequence[int]) -> Iterator[BlockId]:
        blocks = held.tokens // self.block_tokens
        if blocks <= chain.captured:
            return
        chain.grow(tokens, held.tokens)
        for index in range(chain.captured, blocks):
            wish = chain.block(index, tokens)
            if self._lacks(wish.key):
                yield wish
        chain.captured = blocks

    def _keep_rows(self, chain: Chain, held: Held, wanted: Sequence[BlockId]) -> None:
        if not wanted:
            return
        spans = [(wish.start, wish.start + len(wish.tokens)) for wish in wanted]
        for wish, tensors in zip(wanted, self.layout.cut(held, spans), strict=True):
            if tensors is not None:
                self.keep(chain, Block(wish, tensors))

    def _keep_tail(self, chain: Chain, held: Held, tokens: Sequence[int], end: int) -> None:
        tail = chain.tail(tokens, end)
        if not tail.tokens or self.hot.contains(tail.key):
            return
        (tensors,) = self.layout.cut(held, [(tail.start, end)])
        if self.layout.has_state and tensors is not None:
            state = self.layout.copy_state(held) if held.tokens == end else None
            tensors = None if state is None else tensors | state.tensors()
        if tensors is not None:
            self.keep(chain, Block(tail, tensors))

    def _lacks(self, key: str) -> bool:
        """In either tier that is on."""
        on_disk = self.spill is None or self.spill.contains(key)
        return not on_disk or (self.hot.is_on and not self.hot.contains(key))
