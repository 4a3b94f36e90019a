"""The writing side of a store: one I/O thread behind a queue that is bounded in bytes.

The engine thread hands over a block and goes on: a full queue drops the block and counts it, it never blocks a step. What waits
is visible through `pending`, so a look-up that asks here first and the store second misses nothing that was captured.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from cachestore.block import Block
from cachestore.counters import Drop
from cachestore.store import Store

_log = logging.getLogger(__name__)
_TOUCHES_MAX = 1024  # a hung disk must not let them pile up; a lost touch only makes a chain look older


class Writer:
    def __init__(self, store: Store, max_pending_bytes: int) -> None:
        self.store: Final = store
        self.max_pending_bytes: Final = max_pending_bytes
        self._changed = threading.Condition()  # its lock guards every field below
        self._queue: deque[Block | Sequence[str]] = deque()
        self._pending: dict[str, Block] = {}
        self._pending_bytes = 0
        self._touches = 0
        self._closed = False
        # A daemon: a disk that hangs must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name="cachestore-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        with self._changed:
            return self._pending_bytes

    def submit(self, block: Block) -> bool:
        """True when the block waits to be written; False when it was dropped. Never blocks on the disk."""
        with self._changed:
            if block.id.key in self._pending:
                return True
            if self._closed:
                return self.store.drop(Drop.CLOSED)
            if self._pending_bytes + block.nbytes > self.max_pending_bytes:
                return self.store.drop(Drop.QUEUE_FULL)
            self._pending[block.id.key] = block
            self._pending_bytes += block.nbytes
            self._queue.append(block)
            self._changed.notify_all()
            return True

    def touch_chain(self, keys: Sequence[str]) -> None:
        """`Store.touch_chain`, after all that was submitted before it."""
        with self._changed:
            if keys and not self._closed and self._touches < _TOUCHES_MAX:
                self._touches += 1
                self._queue.append(tuple(keys))
                self._changed.notify_all()

    def pending(self, key: str) -> Block | None:
        """The block if it still waits. Ask here before the store: it leaves this queue only once it is published."""
        with self._changed:
            return self._pending.get(key)

    def flush(self, deadline_s: float) -> int:
        """Waits until all is written, at most `deadline_s` from now. Returns how many blocks still wait."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while (self._pending or self._touches) and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return len(self._pending)

    def close(self, deadline_s: float) -> int:
        """Takes no more, flushes, and drops what the deadline left over. Returns how many blocks that were."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        left = self.flush(deadline_s)
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()
        for _ in range(left):
            self.store.drop(Drop.CLOSED)
        return left

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if not work:
                self.store.look_when_due()
                continue
            try:
                if isinstance(work, Block):
                    self.store.put(work)
                else:
                    self.store.touch_chain(work)
            except Exception:  # the thread's boundary: one block is lost, the next may fare better
                _log.exception("block store: a write failed")
                self.store.drop(Drop.FAILED)
            self._done(work)

    def _next(self) -> Block | Sequence[str] | None:
        """None: the end. An empty chain: idle for so long that it is time to see whether the directory has come back."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return None
                if not self._changed.wait(self.store.recheck_s):
                    return ()
            return self._queue.popleft()

    def _done(self, work: Block | Sequence[str]) -> None:
        with self._changed:
            if isinstance(work, Block):
                del self._pending[work.id.key]
                self._pending_bytes -= work.nbytes
            else:
                self._touches -= 1
            self._changed.notify_all()
