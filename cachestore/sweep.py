"""One pass over a store: what to delete, and deleting it. The only file of this package that removes other writers' files.

Nothing is deleted outside a root with the marker file. Rubbish goes first (older formats, old temporaries, old .bad files),
then the blocks used longest ago, over all namespaces. What is gone when its turn comes was not freed by us: counts are of what
this pass unlinked. Must not know processes or who asked.
"""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cachestore import tree
from cachestore.index import Entry, What, directories, modified_ns, scan, stale_formats
from cachestore.namespaces import of_model

_LOW_WATERMARK = 0.9  # of the cap: a pass over a full store frees enough for the next passes to have nothing to do
_TEMPORARY_AGE_NS = 600 * 10**9  # no write of one block takes this long
_BAD_AGE_NS = 86_400 * 10**9  # a day to look at one
_EMPTY_AGE_S = 600


@dataclass(frozen=True, slots=True)
class Policy:
    max_bytes: int
    min_free_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`total_bytes` is what is there now; `doomed` what to delete, in this order."""

    total_bytes: int
    files: int
    doomed: Sequence[Entry]


@dataclass(slots=True)
class Report:
    """One pass. `state` is ok, or why nothing was looked at; counts are by kind, of what was or (dry) would be deleted.

    `began` is a monotonic clock's, the same in all processes of one machine: what was published before it is in `total_bytes`.
    """

    state: str
    began: float = 0.0
    total_bytes: int = 0
    files: int = 0
    free_bytes: int = 0
    deleted_files: Counter[str] = field(default_factory=Counter[str])
    deleted_bytes: int = 0
    failed_files: int = 0
    dry_run: bool = False

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - (0 if self.dry_run else self.deleted_bytes)

    def plain(self) -> dict[str, object]:
        """As JSON."""
        return {
            "began": self.began,
            "state": self.state,
            "dry_run": self.dry_run,
            "files": self.files,
            "bytes": self.total_bytes,
            "left_bytes": self.left_bytes,
            "free_bytes": self.free_bytes,
            "deleted_files": {str(what): count for what, count in self.deleted_files.items() if count},
            "deleted_bytes": self.deleted_bytes,
            "failed_files": self.failed_files,
        }


def plan(entries: Iterable[Entry], free_bytes: int, policy: Policy, now_ns: int) -> Plan:
    """Rubbish always goes. Blocks go, least recently used first, once the cap or the free-space floor is broken."""
    total_bytes = files = freed_bytes = 0
    doomed: list[Entry] = []
    candidates: list[Entry] = []
    for entry in entries:
        total_bytes += entry.size_bytes
        files += entry.what is not What.FIXTURE
        if is_rubbish(entry, now_ns):
            doomed.append(entry)
            freed_bytes += entry.size_bytes
        elif entry.what in (What.BLOCK, What.BAD):
            candidates.append(entry)
    over_bytes = total_bytes - int(policy.max_bytes * _LOW_WATERMARK) if total_bytes - freed_bytes > policy.max_bytes else 0
    wanted_bytes = max(over_bytes, policy.min_free_bytes - free_bytes)
    if freed_bytes < wanted_bytes:
        candidates.sort(key=lambda entry: (entry.what is not What.BAD, entry.used_ns))
        for entry in candidates:
            if freed_bytes >= wanted_bytes:
                break
            doomed.append(entry)
            freed_bytes += entry.size_bytes
    return Plan(total_bytes, files, doomed)


def run_pass(root: Path, policy: Policy, *, dry_run: bool = False) -> Report:
    """One look over the store, and the deletions that follow from it. With `dry_run` it only reports them."""
    began = time.monotonic()
    try:
        if not tree.is_marked(root):
            return Report(_why_not(root), began)
        free_bytes = shutil.disk_usage(root).free
        chosen = plan(scan(root), free_bytes, policy, time.time_ns())
    except OSError as error:
        return Report(f"unreadable: {error}", began)
    report = Report("ok", began, chosen.total_bytes, chosen.files, free_bytes, dry_run=dry_run)
    _carry_out(chosen.doomed, report)
    if not dry_run:
        report.deleted_files["empty_namespace"] += _tidy(root)
    return report


def clear(root: Path, model: str | None = None) -> Report:
    """Deletes the blocks of one model, or of all. Writers go on: what they ask for is a miss, what they write is kept.

    Directories and fresh temporaries stay, as a writer may be between making one and using it.
    """
    began = time.monotonic()
    try:
        if not tree.is_marked(root):
            return Report(_why_not(root), began)
        entries = list(scan(root))
    except OSError as error:
        return Report(f"unreadable: {error}", began)
    report = Report("ok", began, sum(entry.size_bytes for entry in entries), len(entries), shutil.disk_usage(root).free)
    now_ns = time.time_ns()
    namespaces = None if model is None else [f"{path}{os.sep}" for path in of_model(root, model)]
    _carry_out(_in_namespaces(entries, namespaces, now_ns), report)
    return report


def _in_namespaces(entries: Iterable[Entry], namespaces: Sequence[str] | None, now_ns: int) -> Iterator[Entry]:
    for entry in entries:
        whole = entry.what in (What.BLOCK, What.BAD) or is_rubbish(entry, now_ns)
        if whole and (namespaces is None or entry.path.startswith(tuple(namespaces))):
            yield entry


def _why_not(root: Path) -> str:
    return "not_ours" if root.exists() and any(root.iterdir()) else "missing"


def _carry_out(doomed: Iterable[Entry], report: Report) -> None:
    for entry in doomed:
        outcome = True if report.dry_run else _delete(entry)
        if outcome:
            report.deleted_files[entry.what] += 1
            report.deleted_bytes += entry.size_bytes
        elif outcome is False:
            report.failed_files += 1


def is_rubbish(entry: Entry, now_ns: int) -> bool:
    match entry.what:
        case What.STALE_FORMAT:
            return True
        case What.TEMPORARY:
            return now_ns - entry.used_ns > _TEMPORARY_AGE_NS
        case What.BAD:
            return now_ns - entry.changed_ns > _BAD_AGE_NS
        case _:
            return False


def _delete(entry: Entry) -> bool | None:
    """None: it was gone already, or has another name by now."""
    path = Path(entry.path)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except (IsADirectoryError, PermissionError):  # unlink of a directory: the first on Linux, the second on macOS
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except OSError:
        return False
    return True


def _tidy(root: Path) -> int:
    """Removes directories left without files. rmdir refuses one that has any, and a writer makes anew what it misses."""
    for stale in stale_formats(root):
        for directory, _, _ in os.walk(stale, topdown=False):
            _rmdir(Path(directory))
    removed = 0
    old_ns = time.time_ns() - _EMPTY_AGE_S * 10**9
    for namespace in directories(root / tree.FORMAT_DIR):
        for directory in directories(namespace):
            if modified_ns(directory) < old_ns:
                _rmdir(directory)
        with contextlib.suppress(OSError):
            if modified_ns(namespace) < old_ns and [path.name for path in namespace.iterdir()] == [tree.NAMESPACE_FILE]:
                (namespace / tree.NAMESPACE_FILE).unlink()
                namespace.rmdir()
                removed += 1
    return removed


def _rmdir(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
