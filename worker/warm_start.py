"""Back into RAM what a model used last, while nobody waits: a thread that reads blocks of the namespace, newest chains first.

It only reads. What it finds goes to the engine thread in small batches, and fills a share of the RAM tier at most; while the
engine has work it stands still. Must not know MLX.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from cachestore.block import Block
from cachestore.recent import Recent
from cachestore.store import Store

SHARE = 2
"""Half of the RAM tier at most: the rest is for who comes now."""
MOST_BYTES = 1 << 30
"""A second or two of reading. More would be read again sooner than used."""
BATCH_BYTES = 8 << 20
PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class WarmStart:
    def __init__(
        self, store: Store, hot_bytes: int, deliver: Callable[[Sequence[Block]], None], is_busy: Callable[[], bool]
    ) -> None:
        self._store = store
        self._budget_bytes = min(hot_bytes // SHARE, MOST_BYTES)
        self._deliver = deliver
        self._is_busy = is_busy
        self._stopped = threading.Event()
        # A daemon: a disk that hangs must not keep the process from leaving.
        self._thread = threading.Thread(target=self._main, name="warm-start", daemon=True)

    def start(self) -> None:
        if self._budget_bytes > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _main(self) -> None:
        try:
            self._run()
        except Exception:  # the thread's boundary: the RAM tier just starts empty
            _log.exception("the warm start failed")

    def _run(self) -> None:
        blocks, read_bytes, batch_bytes = list[Block](), 0, 0
        for wanted in Recent(self._store.directory).in_order():
            while self._is_busy() and not self._stopped.is_set():
                self._stopped.wait(PAUSE_S)
            if self._stopped.is_set():
                return
            tensors = self._store.get(wanted)
            block = None if tensors is None else Block(wanted, tensors)
            if block is not None and read_bytes + block.nbytes > self._budget_bytes:
                break
            if block is not None:
                blocks.append(block)
                read_bytes, batch_bytes = read_bytes + block.nbytes, batch_bytes + block.nbytes
            if batch_bytes >= BATCH_BYTES:
                self._deliver(blocks)
                blocks, batch_bytes = [], 0
        if blocks:
            self._deliver(blocks)
        _log.info("warm start: %d bytes of KV are back in RAM", read_bytes)
