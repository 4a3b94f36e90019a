"""One prompt's prefix on its way from the tiers into a cache, a slice at a time.

The first block that is missing or not what it should be ends the prefix there. Runs on the engine thread, between two steps;
must not know requests or lanes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachestore.block import Block, BlockId
from worker.chain import Chain
from worker.kv import Assembly
from worker.mlx_types import Cache
from worker.prefix import PrefixCache


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
        self._hot_tokens = 0
        self._cold_tokens = 0
        self._assembly: Assembly | None = None
        self._work = self._run()

    def advance(self, until: float) -> Restored | None:
        """Goes on until the clock passes `until`; the outcome once it is complete."""
        for _ in self._work:
            if time.monotonic() >= until:
                return None
        self._prefix.count(len(self._prompt), self._hot_tokens, self._cold_tokens)
        if self._assembly is None or not self._assembly.tokens:
            return Restored()
        return Restored(self._assembly.cache(), self._hot_tokens, self._cold_tokens)

    def _run(self) -> Iterator[None]:
        found = sum(self._prefix.probe(self._chain, self._prompt))
        if not found:
            return
        self._assembly = assembly = Assembly(self._prefix.layout, found)
        whole = True
        for index in range(found // self._prefix.block_tokens):
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
