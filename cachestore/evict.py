"""The janitor: keeps the block store under its byte cap and off the disk's last bytes, as a process of its own.

Prints one JSON line per pass over the store, so that whoever grants write credits knows what was there and when. On the
lifeline (a pipe whose other end the parent holds) it takes orders, one JSON object a line: `{"do": "pass"}`, with `"dry_run":
true` if nothing is to go, or `{"do": "clear", "model": M}`; an `"id"` comes back with the answer. It may be killed at any
moment, ends at the lifeline's EOF and at SIGTERM, and ignores SIGINT and SIGHUP.
`python -P -m cachestore.evict --help` lists the options.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

from cachestore.index import Pulse, pulse
from cachestore.sweep import Policy, Report, clear, run_pass

_LOOK_ANYWAY_S = 600.0  # an idle store is looked over for what has come of age

Order = dict[str, object]


class Janitor:
    """A pass when something was written, the disk is nearly full, rubbish may have come of age, or on request."""

    def __init__(self, root: Path, policy: Policy, *, dry_run: bool) -> None:
        self._root = root
        self._policy = policy
        self._dry_run = dry_run
        self._last_pulse: Pulse | None = None
        self._again_at = 0.0

    def look(self) -> None:
        """A pass if there is reason for one; idling costs little."""
        found = pulse(self._root)
        low = _free_bytes(self._root) < self._policy.min_free_bytes
        if found != self._last_pulse or time.monotonic() >= self._again_at or low:
            self._last_pulse, self._again_at = found, time.monotonic() + _LOOK_ANYWAY_S
            self._pass({})

    def obey(self, order: Order) -> None:
        match order.get("do"):
            case "pass":
                self._pass(order)
            case "clear":
                model = order.get("model")
                report = clear(self._root, model if isinstance(model, str) else None)
                _print("cache_clear", report, order)
            case _:
                print(json.dumps({"event": "unknown_order", "id": order.get("id")}), flush=True)

    def _pass(self, order: Order) -> None:
        dry_run = self._dry_run or order.get("dry_run") is True
        _print("cache_pass", run_pass(self._root, self._policy, dry_run=dry_run), order)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C or the end of the terminal is the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    if options.lifeline_fd is not None:
        threading.Thread(target=_follow_parent, args=(options.lifeline_fd, orders), daemon=True).start()
    policy = Policy(options.max_bytes, options.min_free_bytes)
    if options.once:
        report = run_pass(options.root, policy, dry_run=options.dry_run)
        _print("cache_pass", report, {})
        return 0 if report.state == "ok" else 1
    return _watch(Janitor(options.root, policy, dry_run=options.dry_run), orders, options.interval)


def _watch(janitor: Janitor, orders: "queue.SimpleQueue[Order]", interval_s: float) -> NoReturn:
    janitor.look()
    while True:
        try:
            janitor.obey(orders.get(timeout=interval_s))
        except queue.Empty:
            janitor.look()


def _follow_parent(lifeline_fd: int, orders: "queue.SimpleQueue[Order]") -> None:
    with contextlib.suppress(OSError), os.fdopen(lifeline_fd, "rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                order = cast("object", json.loads(line))
                if isinstance(order, dict):
                    orders.put(cast("Order", order))
    os._exit(0)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _free_bytes(root: Path) -> float:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return float("inf")  # nothing there to delete


def _print(event: str, report: Report, order: Order) -> None:
    print(json.dumps({"event": event, "id": order.get("id"), **report.plain()}), flush=True)


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
