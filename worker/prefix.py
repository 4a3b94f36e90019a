"""The prefix cache of one model: finds blocks in RAM, in the write queue and on disk, restores and captures them.

Any doubt about a block is a miss, and a miss ends the chain there. Runs on the engine thread; must not know requests, only
tokens. The cache may make an answer faster, never different.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cachestore.block import Block, BlockId, Tensor
from cachestore.keys import namespace_root
from cachestore.store import Namespace
from worker.chain import Chain
from worker.hot import HotTier
from worker.kv import Assembly, Layout
from worker.lanes import Held
from worker.mlx_types import Cache
from worker.spill import Spill

KEY_TAG = "text"


@dataclass(frozen=True, slots=True)
class Restored:
    """`cache` is None where nothing was found."""

    cache: Cache | None = None
    hot_tokens: int = 0
    cold_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.hot_tokens + self.cold_tokens


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

    def restore(self, chain: Chain, prompt: Sequence[int]) -> "Restore":
        return Restore(self, chain, prompt)

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


class Restore:
    """One prompt's prefix on its way into a cache, a slice at a time."""

    def __init__(self, prefix: PrefixCache, chain: Chain, prompt: Sequence[int]) -> None:
        self._prefix = prefix
        self._chain = chain
        self._prompt = prompt
        self._hot_tokens = 0
        self._cold_tokens = 0
        found = sum(prefix.probe(chain, prompt))
        self._assembly = Assembly(prefix.layout, found) if found else None
        self._work = self._run(self._assembly, found // prefix.block_tokens) if self._assembly else iter(())

    def advance(self, until: float) -> Restored | None:
        """Goes on until the clock passes `until`; the outcome once it is complete."""
        for _ in self._work:
            if time.monotonic() >= until:
                return None
        self._prefix.count(len(self._prompt), self._hot_tokens, self._cold_tokens)
        if self._assembly is None or not self._assembly.tokens:
            return Restored()
        return Restored(self._assembly.cache(), self._hot_tokens, self._cold_tokens)

    def _run(self, assembly: Assembly, blocks: int) -> Iterator[None]:
        whole = True
        for index in range(blocks):
            wanted = self._chain.block(index, self._prompt)
            if whole:
                whole = self._add(assembly, wanted)
            else:  # reading sets damaged ones aside, and what is set aside this prefill will write anew
                self._prefix.find(wanted)
            yield
        last = len(self._prompt) - 1
        if whole and assembly.tokens == last // self._prefix.block_tokens * self._prefix.block_tokens:
            tail = self._chain.tail(self._prompt, last)
            if tail.tokens:
                self._add(assembly, tail)
        self._touch(assembly.tokens // self._prefix.block_tokens)
        while assembly.tokens and assembly.convert_one():
            yield

    def _add(self, assembly: Assembly, wanted: BlockId) -> bool:
        is_tail = len(wanted.tokens) < self._prefix.block_tokens
        tensors, is_cold = (self._prefix.hot.get(wanted), False) if is_tail else self._prefix.find(wanted)
        if tensors is None or not assembly.add(tensors, len(wanted.tokens)):
            return False
        if is_cold:
            self._cold_tokens += len(wanted.tokens)
            before = self._chain.keys(wanted.start // self._prefix.block_tokens)
            self._prefix.hot.put(Block(wanted, tensors), before)
            return True
        self._hot_tokens += len(wanted.tokens)
        if not is_tail:  # its write may have been dropped, or the janitor was here since
            self._prefix.write_through(Block(wanted, tensors))
        return True

    def _touch(self, blocks: int) -> None:
        keys = self._chain.keys(blocks)
        self._chain.captured = blocks
        self._prefix.hot.touch(keys)
        if keys and self._prefix.spill is not None:
            self._prefix.spill.touch(keys)
