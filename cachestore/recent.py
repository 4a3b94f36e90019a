"""What a namespace holds, most recently used first and whole chains from their roots on: the order in which to read ahead.

Lists the files and reads headers and tokens, never a payload. What has lost its beginning is of no use and is left out.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from cachestore import tree
from cachestore.block import BadBlock, BlockId, identify_from
from cachestore.index import directories, modified_ns
from cachestore.keys import block_key

_SUFFIX = ".safetensors"


class Recent:
    def __init__(self, namespace: Path) -> None:
        self._namespace = namespace
        self._used_ns: dict[str, int] = {}
        self._passed: dict[str, bool] = {}
        """Keys that were looked at, and whether they were given out."""

    def in_order(self) -> Iterator[BlockId]:
        """A block comes after the one before it, and a snapshot after its own block's rows. Linear in what is given out."""
        self._used_ns = {
            key: modified_ns(tree.block_path(self._namespace, key))
            for directory in directories(self._namespace)
            for key in _keys_in(directory)
        }
        has_rows = any(_is_rows(key) for key in self._used_ns)
        for key in sorted(self._used_ns, key=lambda key: self._used_ns[key], reverse=True):
            yield from self._chain(key if _is_rows(key) else key[:-1]) if has_rows else ()
            if not _is_rows(key) and (not has_rows or self._passed.get(key[:-1])):
                snapshot = self._identified(key)
                if snapshot is not None:
                    yield snapshot

    def _chain(self, key: str) -> Iterator[BlockId]:
        """From the first block that was not given out yet up to this one, if all before it are there."""
        found: list[BlockId] = []
        while key not in self._passed:
            block = self._identified(key) if key in self._used_ns else None
            self._passed[key] = False
            if block is None:
                return
            found.append(block)
            if block.start == 0:
                break
            key = block_key(block.parent)
        else:
            if not self._passed[key]:
                return
        for block in reversed(found):
            self._passed[block.key] = True
            yield block

    def _identified(self, key: str) -> BlockId | None:
        """What the file says it is, if that is what its name says."""
        try:
            with tree.block_path(self._namespace, key).open("rb", buffering=0) as file:
                block = identify_from(lambda offset, size: os.pread(file.fileno(), size, offset))
        except (OSError, BadBlock):
            return None
        return block if block.key == key else None


def _keys_in(directory: Path) -> Iterator[str]:
    try:
        names = os.listdir(directory)  # noqa: PTH208  # names are all that is wanted of 50,000 files
    except OSError:
        return
    for name in names:
        if tree.kind_of(name) is tree.Kind.BLOCK:
            yield name.removesuffix(_SUFFIX)


def _is_rows(key: str) -> bool:
    return not key.endswith("s")
