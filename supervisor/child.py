"""What every child process does first: read its arguments, begin to log, tie its life to the supervisor's, take signals.

Workers and the gateway are started as `python -P -m PACKAGE --control … --identity … --nonce … --lifeline-fd N --log-level L`.
Must not import anything heavy: it runs before MLX.
"""

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildArgs:
    control: str
    """Endpoint of the supervisor's control socket."""
    identity: str
    nonce: str
    lifeline_fd: int
    http_fd: int | None
    """The listening socket the gateway inherits."""


def child_args(argv: Sequence[str]) -> ChildArgs:
    """The arguments; from here on the process logs to standard error, as much as they say."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--control", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--nonce", required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--http-fd", type=int, default=None)
    parser.add_argument("--log-level", default="info")
    got = parser.parse_args(argv)
    logging.basicConfig(level=got.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    return ChildArgs(got.control, got.identity, got.nonce, got.lifeline_fd, got.http_fd)


def settle_in(lifeline_fd: int, on_orphaned: Callable[[], None]) -> None:
    """Ignores SIGINT and SIGHUP, dumps stacks on SIGUSR1, and calls `on_orphaned` on a thread once the supervisor is gone.

    `on_orphaned` has to end in `os._exit`; it may flush for a bounded time first.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C in the terminal, and its end, are for the supervisor alone
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.set_inheritable(lifeline_fd, False)
    _die_with_parent()
    threading.Thread(target=_watch_lifeline, args=(lifeline_fd, on_orphaned), name="lifeline", daemon=True).start()


def _watch_lifeline(fd: int, on_orphaned: Callable[[], None]) -> None:
    """The supervisor holds the only write end of this pipe: end of file means it is dead."""
    try:
        while os.read(fd, 1):
            pass
    finally:
        try:
            on_orphaned()
        finally:
            os._exit(0)


def _die_with_parent() -> None:
    """Linux only: a SIGTERM from the kernel, should the lifeline's thread be stuck. SIGKILL would leave no time for a flush."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
