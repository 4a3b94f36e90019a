"""One namespace of the shared block store, as a worker sees it: put, get, contains, touch_chain.

Every answer is data or a miss; no OSError leaves this file. A directory that is missing, foreign, read-only or full means
serving without it: misses and drops that are counted, one warning per change, another look every `recheck_s`. A block that
fails its checks is set aside and not asked for again. Safe to call from several threads; must not know models or MLX.
"""

import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cachestore import int8, tree
from cachestore.block import BadBlock, Block, BlockId, Tensor, decode, encode
from cachestore.counters import Counters, Drop, Miss, Tally
from cachestore.health import Health, Trouble, Vigil, of_write_error

RECHECK_S = 10.0

_log = logging.getLogger(__name__)
_KNOWN_BAD_MAX = 4096
_KNOWN_BAD_S = 600.0  # another process may have replaced the file since: one more try per key and ten minutes
_FILE_MAX_BYTES = 4 << 30  # far above any block; a damaged length must not become an allocation
_SET_ASIDE = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Namespace:
    """Blocks of one model with one layout. `model` is for people who read namespace.json; the hashes are the identity."""

    model: str
    fingerprint: str
    layout: str
    block_tokens: int


class Store:
    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        *,
        read_only: bool = False,
        as_int8: bool = False,
        recheck_s: float = RECHECK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root: Final = root
        self.namespace: Final = namespace
        self.read_only: Final = read_only
        self._as_int8 = as_int8
        self._dir = tree.namespace_dir(root, namespace.fingerprint, namespace.layout)
        self._clock = clock
        self._lock = threading.Lock()  # guards _vigil, _tally and _known_bad; never held during file operations
        self._vigil = Vigil(recheck_s)
        self._tally = Tally()
        self._known_bad: dict[str, float] = {}
        self.recheck_s: Final = recheck_s
        self.look_when_due()

    @property
    def directory(self) -> Path:
        """Of this namespace; there may be none yet."""
        return self._dir

    @property
    def health(self) -> Health:
        with self._lock:
            return self._vigil.health

    def counters(self) -> Counters:
        with self._lock:
            return self._tally.counters()

    def contains(self, key: str) -> bool:
        """Whether a get may succeed. Says nothing about what is in the file."""
        return self._can_read() and not self._is_known_bad(key) and _is_regular(tree.block_path(self._dir, key))

    def get(self, expected: BlockId) -> Mapping[str, Tensor] | None:
        """The block's tensors, checked, as views into one buffer; None is a miss, and the reason is counted."""
        if not self._can_read():
            return self._miss(Miss.UNAVAILABLE)
        if self._is_known_bad(expected.key):
            return self._miss(Miss.KNOWN_BAD)
        path = tree.block_path(self._dir, expected.key)
        try:
            data = _read(path)
            tensors = decode(data, expected)
            if self._as_int8:
                tensors = int8.unpack(tensors)
        except FileNotFoundError:
            return self._miss(Miss.ABSENT)
        except BadBlock as bad:
            self._set_aside(expected.key, path, bad.reason)
            return self._miss(Miss.BAD)
        except OSError as error:
            if error.errno not in _SET_ASIDE:  # out of descriptors or memory, a vanished mount: not this file's fault
                return self._miss(Miss.UNREADABLE)
            self._set_aside(expected.key, path, errno.errorcode[error.errno])
            return self._miss(Miss.BAD)
        with self._lock:
            self._tally.hits += 1
            self._tally.bytes_read += len(data)
        return tensors

    def put(self, block: Block) -> bool:
        """True when the block is on disk afterwards. A published file is never written again."""
        if self.read_only:
            return self.drop(Drop.READ_ONLY)
        if not self._can_write():
            return self.drop(Drop.UNAVAILABLE)
        key = block.id.key
        path = tree.block_path(self._dir, key)
        if _is_regular(path) and not self._is_known_bad(key):
            return True
        buffers = encode(Block(block.id, int8.pack(block.tensors)) if self._as_int8 else block)
        try:
            self._put_in_place(key, path, buffers)
        except OSError as error:
            if (outcome := of_write_error(error)) is not None:
                self._wrote(outcome)
            return self.drop(Drop.FAILED)
        self._wrote(Health())
        with self._lock:
            self._known_bad.pop(key, None)
            self._tally.blocks_written += 1
            self._tally.bytes_written += sum(len(buffer) for buffer in buffers)
        return True

    def touch_chain(self, keys: Sequence[str]) -> None:
        """Marks a chain, given root first, as just used. Call it after restoring a chain and after writing its last block.

        Leaf first, root last: the janitor deletes what was used longest ago, and a child without its parent is of no use.
        """
        if self.read_only or not self._can_read():
            return
        now_ns = 0
        for key in reversed(keys):
            # The kernel's own "now" has a resolution of milliseconds, and a clock may stand still or be set back;
            # equal times would leave the order to chance.
            now_ns = max(time.time_ns(), now_ns + 1)
            try:
                os.utime(tree.block_path(self._dir, key), ns=(now_ns, now_ns))
            except OSError:
                continue  # evicted meanwhile, or not writable: it ages as if unused

    def drop(self, reason: Drop) -> bool:
        """Counts a block that will not be written. Always False."""
        with self._lock:
            self._tally.dropped[reason] += 1
        return False

    def _miss(self, reason: Miss) -> None:
        with self._lock:
            self._tally.misses[reason] += 1

    def _put_in_place(self, key: str, path: Path, buffers: list[bytes | memoryview]) -> None:
        try:
            self._publish(path, buffers)
        except IsADirectoryError:
            self._set_aside(key, path, "EISDIR")
            self._publish(path, buffers)

    def _publish(self, path: Path, buffers: list[bytes | memoryview]) -> None:
        try:
            tree.publish(path, buffers)
        except FileNotFoundError:  # the first block under this prefix, or the janitor tidied the directory away
            if not tree.is_marked(self.root):
                raise
            self._make_namespace()
            tree.make_dir(path.parent)
            tree.publish(path, buffers)

    def _make_namespace(self) -> None:
        tree.make_dir(self._dir.parent)
        tree.make_dir(self._dir)
        path = self._dir / tree.NAMESPACE_FILE
        if not path.exists():
            described = {**asdict(self.namespace), "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            tree.publish(path, [json.dumps(described, indent=2).encode() + b"\n"])

    def _set_aside(self, key: str, path: Path, reason: str) -> None:
        renamed = False
        if not self.read_only:
            try:
                path.rename(path.with_name(path.name + tree.BAD_SUFFIX))
                renamed = True
            except FileNotFoundError:
                renamed = True  # another worker was quicker
            except OSError:
                pass
        with self._lock:
            self._tally.bad[reason] += 1
            if not renamed:
                while len(self._known_bad) >= _KNOWN_BAD_MAX:
                    del self._known_bad[next(iter(self._known_bad))]
                self._known_bad[key] = self._clock() + _KNOWN_BAD_S
        _log.warning("bad block %s (%s): %s", path, reason, "renamed to .bad" if renamed else "ignored from now on")

    def _is_known_bad(self, key: str) -> bool:
        with self._lock:
            until = self._known_bad.get(key)
            if until is not None and until <= self._clock():
                del self._known_bad[key]
                return False
            return until is not None

    def _can_read(self) -> bool:
        self.look_when_due()
        return self.health.can_read

    def _can_write(self) -> bool:
        self.look_when_due()
        with self._lock:
            return self._vigil.may_write()

    def look_when_due(self) -> None:
        """Looks whether the directory can be used, at most every `recheck_s`. Every get and put does; call it when idle."""
        with self._lock:
            due = self._vigil.look_due(self._clock())
        if due:
            seen = self._look()
            with self._lock:
                changed = self._vigil.looked(seen)
            if changed:
                self._announce(seen)

    def _wrote(self, outcome: Health) -> None:
        with self._lock:
            changed = self._vigil.wrote(outcome, self._clock())
        if changed:
            self._announce(outcome)

    def _look(self) -> Health:
        try:
            if not self.read_only:
                tree.claim(self.root)
            elif not tree.is_marked(self.root):
                return Health(Trouble.MISSING, f"{self.root} has no {tree.MARKER} file")
        except tree.NotOurs as refusal:
            return Health(Trouble.NOT_OURS, str(refusal))
        except FileNotFoundError as error:
            return Health(Trouble.MISSING, str(error))
        except OSError as error:
            return Health(Trouble.UNREADABLE, str(error))
        if self.read_only:
            return Health()
        try:
            self._make_namespace()
        except OSError as error:
            return of_write_error(error) or Health(Trouble.IO_ERROR, str(error))
        if not os.access(self._dir, os.W_OK | os.X_OK):
            return Health(Trouble.READ_ONLY, f"{self._dir} is not writable")
        return Health()

    def _announce(self, health: Health) -> None:
        if health.trouble is None:
            _log.info("block store %s: ready", self.root)
        else:
            pause_s = self._vigil.recheck_s
            _log.warning("block store %s: %s (%s); looking again in %g s", self.root, health.trouble, health.detail, pause_s)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _read(path: Path) -> bytes:
    """The whole file through one descriptor: a rename or unlink meanwhile changes nothing in it."""
    # O_NONBLOCK: a FIFO by that name must not hang the worker.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _FILE_MAX_BYTES:
            raise OSError(errno.EINVAL, "not a block file", str(path))
        return file.readall()
