"""The prefix cache of one model: finds blocks in RAM, in the write queue and on disk, and copies new ones out of the batch.

Any doubt about a block is a miss, and a miss ends the chain there. Runs on the engine thread; must not know requests, only
tokens. The cache may make an answer faster, never different.
"""

from collections.abc import Iterator, Mapping, Sequence

from cachestore.block import Block, BlockId, Tensor
from cachestore.keys import namespace_root
from cachestore.store import Namespace
from worker.chain import Chain
from worker.hot import HotTier
from worker.kv import Layout
from worker.lanes import Held
from worker.spill import Spill

KEY_TAG = "text"


class PrefixCache:
    def __init__(self, namespace: Namespace, layout: Layout, hot: HotTier, spill: Spill | None) -> None:
        self.asked_tokens = self.hot_tokens = self.cold_tokens = 0
        self.namespace = namespace
        self.layout = layout
        self.hot = hot
        self.spill = spill
        self.block_tokens = namespace.block_tokens

    def new_chain(self, cache_salt: str) -> Chain:
        root = namespace_root(KEY_TAG, self.namespace.fingerprint, self.namespace.layout, cache_salt)
        return Chain(root, self.block_tokens)

    def probe(self, chain: Chain, prompt: Sequence[int]) -> tuple[int, int]:
        """Tokens that a restore would likely find, in RAM and on disk. Reads no block."""
        hot = cold = 0
        blocks = chain.grow(prompt, len(prompt) - 1)
        for key in chain.keys(blocks):
            if self.hot.contains(key) or (self.spill is not None and self.spill.is_pending(key)):
                hot += self.block_tokens
            elif self.spill is not None and self.spill.contains(key):
                cold += self.block_tokens
            else:
                return hot, cold
        tail = chain.tail(prompt, len(prompt) - 1)
        if tail.tokens and self.hot.contains(tail.key):
            hot += len(tail.tokens)
        return hot, cold

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
        wanted = list(self._completed(chain, held, tokens))
        end = prompt_tokens - 1
        if not chain.tail_captured and held.tokens >= end:
            chain.tail_captured = True
            tail = chain.tail(tokens, end)
            if tail.tokens and not self.hot.contains(tail.key):
                wanted.append(tail)
        if not wanted:
            return
        spans = [(wish.start, wish.start + len(wish.tokens)) for wish in wanted]
        for wish, tensors in zip(wanted, self.layout.cut(held, spans), strict=True):
            self._keep(chain, Block(wish, tensors))

    def count(self, asked_tokens: int, hot_tokens: int, cold_tokens: int) -> None:
        self.asked_tokens += asked_tokens
        self.hot_tokens += hot_tokens
        self.cold_tokens += cold_tokens

    def counters(self) -> dict[str, int]:
        own = {"asked_tokens": self.asked_tokens, "hot_tokens": self.hot_tokens, "cold_tokens": self.cold_tokens}
        hot = self.hot.counters
        own |= {"hot_hits": hot.hits, "hot_evicted": hot.evicted, "hot_refused": hot.refused}
        return own | (self.spill.counters() if self.spill is not None else {})

    def _completed(self, chain: Chain, held: Held, tokens: Sequence[int]) -> Iterator[BlockId]:
        blocks = held.tokens // self.block_tokens
        if blocks <= chain.captured:
            return
        chain.grow(tokens, held.tokens)
        for index in range(chain.captured, blocks):
            wish = chain.block(index, tokens)
            if self._lacks_on_disk(wish.key) or (self.hot.is_on and not self.hot.contains(wish.key)):
                yield wish
        chain.captured = blocks

    def _keep(self, chain: Chain, block: Block) -> None:
        index = block.id.start // self.block_tokens
        self.hot.put(block, chain.keys(index))
        if len(block.id.tokens) == self.block_tokens:
            self.write_through(block)

    def write_through(self, block: Block) -> None:
        if self.spill is not None and not self.spill.contains(block.id.key):
            self.spill.put(block)

    def _lacks_on_disk(self, key: str) -> bool:
        return self.spill is not None and not self.spill.contains(key)
