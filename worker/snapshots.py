"""Which moments of a sequence's recurrent state become snapshots.

Such state cannot be cut like rows, and a copy may be large (77 MB for an 80B hybrid), so copies are kept sparsely: at the last
boundary that a repeat of the prompt can use, where prompts were seen to part, every SNAPSHOT_EVERY_TOKENS, and where a sequence
ends, finished or not. In between the latest copy waits in RAM for one of these. Must not know tiers.
"""

from collections.abc import Callable, Sequence

from cachestore.block import Block, BlockId
from worker.chain import Chain
from worker.kv import Layout, State
from worker.lanes import Held

SNAPSHOT_EVERY_TOKENS = 2048


class Snapshots:
    def __init__(self, layout: Layout, block_tokens: int, is_kept: Callable[[str], bool]) -> None:
        self._layout = layout
        self._block_tokens = block_tokens
        self._is_kept = is_kept
        self._latest: dict[Chain, tuple[BlockId, State]] = {}

    def take(self, chain: Chain, held: Held, tokens: Sequence[int], prompt_tokens: int) -> Block | None:
        """Call right after a step: the snapshot to be kept now, if any."""
        now = held.tokens
        if now % self._block_tokens or now <= chain.snapshot_tokens:
            return None
        latest = self._latest.get(chain)
        if latest is not None and now <= latest[0].start + self._block_tokens:
            return None
        chain.grow(tokens, now)
        wish = chain.snapshot(now // self._block_tokens - 1, tokens)
        if self._is_kept(wish.key):
            self._settle(chain, now)
            return None
        state = self._layout.copy_state(held)
        if state is None:
            return None
        if self._is_worth_keeping(chain, now, prompt_tokens):
            self._settle(chain, now)
            return Block(wish, state.tensors())
        self._latest[chain] = wish, state
        return None

    def leave(self, chain: Chain) -> Block | None:
        """The sequence is over: its latest state, if that is not kept already. What comes next will likely go on from there."""
        latest = self._latest.pop(chain, None)
        return None if latest is None else Block(latest[0], latest[1].tensors())

    def _settle(self, chain: Chain, tokens: int) -> None:
        chain.snapshot_tokens = tokens
        self._latest.pop(chain, None)

    def _is_worth_keeping(self, chain: Chain, now: int, prompt_tokens: int) -> bool:
        last_of_prompt = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        if now in (last_of_prompt, chain.branch_tokens):
            return True
        return now // SNAPSHOT_EVERY_TOKENS > chain.snapshot_tokens // SNAPSHOT_EVERY_TOKENS
