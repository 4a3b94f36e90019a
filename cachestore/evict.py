"""The janitor: keeps the block store under its byte cap and off the disk's last bytes, as a process of its own.

It alone deletes blocks, and only below a root with the marker file: first what is of no use to anyone (older formats, old
temporaries, old .bad files), then the blocks used longest ago, over all namespaces. Prints one JSON line per pass that deleted
something or found another state. It may be killed at any moment. Ends at EOF of the lifeline (a pipe whose other end the parent
holds) and at SIGTERM; ignores SIGINT. `python -P -m cachestore.evict --help` lists the options.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cachestore import tree
from cachestore.index import Entry, Pulse, What, directories, modified_ns, pulse, scan, stale_formats

_LOW_WATERMARK = 0.9  # of the cap: a pass over a full store frees enough for the next passes to have nothing to do
_TEMPORARY_AGE_NS = 600 * 10**9  # no write of one block takes this long
_BAD_AGE_NS = 86_400 * 10**9  # a day to look at one
_EMPTY_AGE_S = 600  # also how often an idle store is looked over for what has come of age


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
    """One pass. `state` is ok, or why nothing was looked at; counts are by kind."""

    state: str
    total_bytes: int = 0
    files: int = 0
    free_bytes: int = 0
    deleted_files: Counter[str] = field(default_factory=Counter[str])
    deleted_bytes: int = 0
    failed_files: int = 0


def plan(entries: Iterable[Entry], free_bytes: int, policy: Policy, now_ns: int) -> Plan:
    """Rubbish always goes. Blocks go, least recently used first, once the cap or the free-space floor is broken."""
    total_bytes = files = freed_bytes = 0
    doomed: list[Entry] = []
    candidates: list[Entry] = []
    for entry in entries:
        total_bytes += entry.size_bytes
        files += entry.what is not What.FIXTURE
        if _is_rubbish(entry, now_ns):
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
    try:
        if not tree.is_marked(root):
            return Report("not_ours" if root.exists() and any(root.iterdir()) else "missing")
        free_bytes = shutil.disk_usage(root).free
        chosen = plan(scan(root), free_bytes, policy, time.time_ns())
    except OSError as error:
        return Report(f"unreadable: {error}")
    report = Report("ok", chosen.total_bytes, chosen.files, free_bytes)
    for entry in chosen.doomed:
        if not dry_run and not _delete(entry):
            report.failed_files += 1
            continue
        report.deleted_files[entry.what] += 1
        report.deleted_bytes += entry.size_bytes
    if not dry_run:
        report.deleted_files["empty_namespace"] += _tidy(root)
    return report


def watch(root: Path, policy: Policy, *, interval_s: float, dry_run: bool = False) -> NoReturn:
    """A pass when something was written, the disk is nearly full or rubbish may have come of age; idling costs little."""
    said: tuple[str, int] | None = None
    last_pulse: Pulse | None = None
    again_at = 0.0
    while True:
        found = pulse(root)
        if found != last_pulse or time.monotonic() >= again_at or _free_bytes(root) < policy.min_free_bytes:
            last_pulse, again_at = found, time.monotonic() + _EMPTY_AGE_S
            report = run_pass(root, policy, dry_run=dry_run)
            if (report.state, report.failed_files) != said or report.deleted_files.total():
                said = report.state, report.failed_files
                _print(report, dry_run=dry_run)
        time.sleep(interval_s)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the parent's to handle
    signal.signal(signal.SIGTERM, _leave)
    if options.lifeline_fd is not None:
        threading.Thread(target=_end_with_parent, args=(options.lifeline_fd,), daemon=True).start()
    policy = Policy(options.max_bytes, options.min_free_bytes)
    if options.once:
        report = run_pass(options.root, policy, dry_run=options.dry_run)
        _print(report, dry_run=options.dry_run)
        return 0 if report.state == "ok" else 1
    watch(options.root, policy, interval_s=options.interval, dry_run=options.dry_run)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _free_bytes(root: Path) -> float:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return float("inf")  # nothing there to delete


def _is_rubbish(entry: Entry, now_ns: int) -> bool:
    match entry.what:
        case What.STALE_FORMAT:
            return True
        case What.TEMPORARY:
            return now_ns - entry.used_ns > _TEMPORARY_AGE_NS
        case What.BAD:
            return now_ns - entry.changed_ns > _BAD_AGE_NS
        case _:
            return False


def _delete(entry: Entry) -> bool:
    path = Path(entry.path)
    try:
        path.unlink()
    except FileNotFoundError:
        pass
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


def _end_with_parent(lifeline_fd: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(lifeline_fd, 1):
            pass
    os._exit(0)


def _print(report: Report, *, dry_run: bool) -> None:
    line = {
        "event": "cache_pass",
        "state": report.state,
        "dry_run": dry_run,
        "files": report.files,
        "bytes": report.total_bytes,
        "free_bytes": report.free_bytes,
        "deleted_files": {what: count for what, count in report.deleted_files.items() if count},
        "deleted_bytes": report.deleted_bytes,
        "failed_files": report.failed_files,
    }
    print(json.dumps(line), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cachestore.evict", description="Deletes the oldest blocks of a prefix cache.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--max-bytes", type=_bytes, required=True)
    parser.add_argument("--min-free-bytes", type=_bytes, required=True)
    parser.add_argument("--interval", type=float, default=5.0, metavar="S")
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, report what would be")
    return parser


def _bytes(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
