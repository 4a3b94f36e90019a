"""The SSD tier of the prefix cache: one namespace of the store, and the queue that writes to it.

Owns the write credit: each block is paid for before it is queued, with the most that its file may take on disk. Never blocks a
step: what finds no room in the queue or no credit is dropped and counted. Must not know MLX or requests.
"""

import threading
import time
from collections.abc import Mapping, Sequence

from cachestore.block import Block, BlockId, Tensor
from cachestore.charge import most_disk_bytes
from cachestore.store import Store
from cachestore.writer import Writer

PENDING_MAX_BYTES = 256 << 20


class Spill:
    def __init__(self, store: Store, write_credit: int | None) -> None:
        self._store = store
        self._writer = Writer(store, PENDING_MAX_BYTES)
        self._credit_bytes = write_credit
        self._books = threading.Lock()  # guards _spent_bytes and _unsettled: the engine thread pays, the heartbeat adds up
        self._spent_bytes = 0
        self._unsettled: dict[str, int] = {}
        """What was paid for blocks that wait to be written."""
        self._dropped = 0
        self._read_s = 0.0

    @property
    def written_bytes(self) -> int:
        return self._store.counters().bytes_written

    def add_credit(self, credit_bytes: int) -> None:
        if self._credit_bytes is not None:
            self._credit_bytes += credit_bytes

    @property
    def trouble(self) -> str | None:
        """Why the store cannot be used as it should, if so. Any thread."""
        health = self._store.health
        return None if health.trouble is None else f"{health.trouble}: {health.detail}"

    def put(self, block: Block) -> None:
        if self.is_pending(block.id.key):
            return
        cost_bytes = most_disk_bytes(block)
        if self._credit_bytes is not None and cost_bytes > self._credit_bytes:
            self._dropped += 1
            return
        with self._books:
            taken = self._writer.submit(block)
            if taken:
                self._spent_bytes += cost_bytes
                self._unsettled[block.id.key] = cost_bytes
        if taken and self._credit_bytes is not None:
            self._credit_bytes -= cost_bytes

    def settled_bytes(self) -> int:
        """Credit spent on writes that are over, whatever came of them: what is on disk of it, a look at the disk will show.

        Any thread.
        """
        with self._books:
            self._unsettled = {key: cost for key, cost in self._unsettled.items() if self.is_pending(key)}
            return self._spent_bytes - sum(self._unsettled.values())

    def is_pending(self, key: str) -> bool:
        return self._writer.pending(key) is not None

    def contains(self, key: str) -> bool:
        """Written, or waiting to be."""
        return self.is_pending(key) or self._store.contains(key)

    def get_pending(self, wanted: BlockId) -> Mapping[str, Tensor] | None:
        """Still in RAM: ask here before `get`."""
        block = self._writer.pending(wanted.key)
        return None if block is None or block.id != wanted else block.tensors

    def get(self, wanted: BlockId) -> Mapping[str, Tensor] | None:
        started_at = time.monotonic()
        found = self._store.get(wanted)
        self._read_s += time.monotonic() - started_at
        return found

    def touch(self, chain: Sequence[str]) -> None:
        self._writer.touch_chain(chain)

    def close(self, deadline_s: float) -> tuple[int, int]:
        """Writes what waits, within the deadline. Returns the blocks this wrote and the blocks it gave up."""
        before = self._store.counters().blocks_written
        left = self._writer.close(deadline_s)
        return self._store.counters().blocks_written - before, left

    def counters(self) -> dict[str, int]:
        """Any thread."""
        counted = self._store.counters()
        named = {"cold_hits": counted.hits, "blocks_written": counted.blocks_written, "bytes_read": counted.bytes_read}
        named |= {f"miss_{reason}": n for reason, n in counted.misses.items()}
        named |= {f"drop_{reason}": n for reason, n in counted.dropped.items()}
        named |= {f"bad_{reason}": n for reason, n in counted.bad.items()}
        named |= {"drop_credit": self._dropped, "read_us": int(self._read_s * 1e6), "settled_bytes": self.settled_bytes()}
        return named if self._credit_bytes is None else named | {"credit_bytes": self._credit_bytes}
