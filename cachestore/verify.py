"""What is in a store, and whether it is sound: counted without reading a block, or every block read and checked.

Reads only, and needs nobody running: each file says itself which block it is. Blocks that come and go meanwhile are left out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachestore import tree
from cachestore.block import BadBlock, BlockId, decode, identify
from cachestore.index import Entry, What, scan
from cachestore.keys import block_key, chain, snapshot_key
from cachestore.namespaces import Found, namespaces

Progress = Callable[[int, int], None]
"""Bytes read so far, bytes in all."""

_MISNAMED = "key"


@dataclass(slots=True)
class Stats:
    """One namespace. Times are Unix times in seconds, of the last use of a block; 0 without blocks."""

    model: str
    name: str
    block_tokens: int
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    set_aside: int = 0
    """Blocks found bad and renamed to .bad."""
    oldest_use: float = 0.0
    newest_use: float = 0.0


@dataclass(frozen=True, slots=True)
class BadFile:
    path: Path
    reason: str


@dataclass(slots=True)
class Verified:
    """One namespace. `unreachable` counts sound blocks that no chain leads to: one before them is gone."""

    model: str
    name: str
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    unreachable: int = 0
    bad: list[BadFile] = field(default_factory=list[BadFile])


@dataclass(frozen=True, slots=True)
class _Link:
    """What is kept of a block once it is checked: with its tokens, 50,000 blocks would take half a gigabyte."""

    parent: str
    start: int
    end: int

    @classmethod
    def of(cls, block_id: BlockId) -> "_Link":
        return cls(block_key(block_id.parent), block_id.start, block_id.start + len(block_id.tokens))


def stats(root: Path) -> list[Stats]:
    """Every namespace that holds something. Raises NotOurs, or FileNotFoundError where there is no store."""
    _require_store(root)
    counted: list[Stats] = []
    for found, entries in _by_namespace(root):
        described = found.described
        own = Stats(found.model, found.path.name, described.block_tokens if described else 0)
        for entry in entries:
            own.bytes += entry.size_bytes
            own.set_aside += entry.what is What.BAD
            if entry.what is What.BLOCK:
                _count_block(own, entry)
        if own.blocks or own.snapshots or own.set_aside:
            counted.append(own)
    return counted


def verify(root: Path, progress: Progress = lambda _done, _total: None) -> list[Verified]:
    """Reads and checks every block: its checksum, its name, its place in the chain. Raises as `stats` does."""
    _require_store(root)
    groups = [(found, [entry for entry in entries if entry.what is What.BLOCK]) for found, entries in _by_namespace(root)]
    total_bytes = sum(entry.size_bytes for _, entries in groups for entry in entries)
    done_bytes = 0
    reports: list[Verified] = []
    for found, entries in groups:
        report = Verified(found.model, found.path.name)
        sound: dict[str, _Link] = {}
        for entry in entries:
            block_id = _check(Path(entry.path), report)
            if block_id is not None:
                sound[block_id.key] = _Link.of(block_id)
                report.bytes += entry.size_bytes
            done_bytes += entry.size_bytes
            progress(done_bytes, total_bytes)
        report.snapshots = sum(_is_snapshot(key) for key in sound)
        report.blocks = len(sound) - report.snapshots
        report.unreachable = _unreachable(sound)
        if entries:
            reports.append(report)
    return reports


def _require_store(root: Path) -> None:
    if tree.is_marked(root):
        return
    if not root.exists():
        raise FileNotFoundError(f"there is no {root}")
    raise tree.NotOurs(f"{root} has no {tree.MARKER} file")


def _by_namespace(root: Path) -> Iterator[tuple[Found, list[Entry]]]:
    groups: dict[Path, list[Entry]] = {}
    parents = root / tree.FORMAT_DIR
    for entry in scan(root):
        path = Path(entry.path)
        if path.is_relative_to(parents) and path != parents:
            groups.setdefault(parents / path.relative_to(parents).parts[0], []).append(entry)
    for found in namespaces(root):
        yield found, groups.get(found.path, [])


def _count_block(own: Stats, entry: Entry) -> None:
    if _is_snapshot(Path(entry.path).stem):
        own.snapshots += 1
    else:
        own.blocks += 1
    used = entry.used_ns / 1e9
    own.oldest_use = min(own.oldest_use or used, used)
    own.newest_use = max(own.newest_use, used)


def _is_snapshot(key: str) -> bool:
    return key.endswith("s")


def _check(path: Path, report: Verified) -> BlockId | None:
    try:
        data = path.read_bytes()
        block_id = identify(data)
        decode(data, block_id)
    except FileNotFoundError:
        return None  # evicted meanwhile
    except BadBlock as bad:
        report.bad.append(BadFile(path, bad.reason))
        return None
    except OSError as error:
        report.bad.append(BadFile(path, error.strerror or str(error)))
        return None
    if path.stem != block_id.key or not _is_its_own_hash(block_id):
        report.bad.append(BadFile(path, _MISNAMED))
        return None
    return block_id


def _is_its_own_hash(block_id: BlockId) -> bool:
    [own] = chain(block_id.parent, block_id.tokens, len(block_id.tokens)) if block_id.tokens else [block_id.parent]
    return block_id.key in (block_key(own), snapshot_key(own))


def _unreachable(sound: Mapping[str, _Link]) -> int:
    """A chain starts at token 0; what follows must begin where a sound block before it ends.

    Snapshots are left out: a model may keep nothing but those, each good by itself.
    """
    rows = {key: link for key, link in sound.items() if not _is_snapshot(key)}
    reached: set[str] = set()
    for key, link in sorted(rows.items(), key=lambda item: item[1].start):
        before = rows.get(link.parent)
        if link.start == 0 or (before is not None and link.parent in reached and before.end == link.start):
            reached.add(key)
    return len(rows) - len(reached)
