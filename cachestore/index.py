"""What is on disk: the file system is the index. Walks one store and says of every entry what it is, how large and how old.

Only format directories (v1, …) are looked into and links are never followed, so nothing outside the store can be listed here
and then deleted. Must not decide anything.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cachestore import tree
from cachestore.keys import KV_FORMAT

_BLOCK_DEPTH = 3  # v1 / namespace / hh
Pulse = frozenset[tuple[str, int]]


class What(StrEnum):
    BLOCK = "block"
    TEMPORARY = "temporary"
    BAD = "bad"
    STALE_FORMAT = "stale_format"
    FIXTURE = "fixture"  # directories, namespace.json, and what we do not know: counted, never evicted


@dataclass(frozen=True, slots=True)
class Entry:
    """`used_ns` is the last write or touch; `changed_ns` also moves with a rename."""

    path: str
    what: What
    size_bytes: int
    used_ns: int
    changed_ns: int


def scan(root: Path) -> Iterator[Entry]:
    """The root, its marker, and all that is below its format directories. Leaves out what vanishes meanwhile."""
    formats = _formats(root)
    for path in (root, root / tree.MARKER, *formats):
        with contextlib.suppress(OSError):
            yield _entry(str(path), What.FIXTURE, path.stat())
    for path, number in formats.items():
        yield from _below(str(path), 1, stale=number < KV_FORMAT, ours=number == KV_FORMAT)


def pulse(root: Path) -> Pulse:
    """Differs from the last one when a file came or went since. Costs one stat per directory instead of one per file."""
    formats = list(_formats(root))
    namespaces = [path for parent in formats for path in directories(parent)]
    prefixes = [path for parent in namespaces for path in directories(parent)]
    return frozenset((str(path), modified_ns(path)) for path in (root / tree.MARKER, *formats, *namespaces, *prefixes))


def stale_formats(root: Path) -> list[Path]:
    """Directories of formats older than ours. A newer one belongs to a newer server: its bytes count, its files stay."""
    return [path for path, number in _formats(root).items() if number < KV_FORMAT]


def directories(path: Path) -> list[Path]:
    """Those directly in `path`, links left out; none when it cannot be listed."""
    return [Path(found.path) for found in _list(str(path)) if found.is_dir(follow_symlinks=False)]


def modified_ns(path: Path) -> int:
    """0 for what is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _formats(root: Path) -> dict[Path, int]:
    numbers = {path: tree.format_number(path.name) for path in directories(root)}
    return {path: number for path, number in numbers.items() if number is not None}


def _below(directory: str, depth: int, *, stale: bool, ours: bool) -> Iterator[Entry]:
    for found in _list(directory):
        try:
            status = found.stat(follow_symlinks=False)
            is_dir = found.is_dir(follow_symlinks=False)
        except OSError:
            continue
        what = What.STALE_FORMAT if stale else _what(found.name, depth, is_dir=is_dir) if ours else What.FIXTURE
        yield _entry(found.path, What.FIXTURE if is_dir and what is not What.BAD else what, status)
        if is_dir:
            yield from _below(found.path, depth + 1, stale=stale, ours=ours)


def _what(name: str, depth: int, *, is_dir: bool) -> What:
    kind = tree.kind_of(name)
    if kind is tree.Kind.BAD and depth == _BLOCK_DEPTH:
        return What.BAD  # also a directory that sat where a block belongs
    if kind is tree.Kind.TEMPORARY and not is_dir:
        return What.TEMPORARY
    if kind is tree.Kind.BLOCK and depth == _BLOCK_DEPTH and not is_dir:
        return What.BLOCK
    return What.FIXTURE


def _list(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except OSError:
        return []


def _entry(path: str, what: What, status: os.stat_result) -> Entry:
    # The disk may hold more than the length (a last partial block) or less as yet (delayed allocation): count the larger.
    size_bytes = max(status.st_size, status.st_blocks * 512)
    return Entry(path, what, size_bytes, status.st_mtime_ns, status.st_ctime_ns)
