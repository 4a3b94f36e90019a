"""One server after another in the same process: what a restart in place hands to its successor, and the step itself.

Lock and listening socket stay open across `exec`: no other server can come between, every connection attempt waits in the
socket's queue, and whoever keeps the service alive sees the same pid go on. Signals that come in between are for the successor:
the kernel keeps what is blocked, also over `exec`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

VARIABLE = "OMLXD_HANDOVER"
"""From one life of the process to the next, and to nobody else: it is taken out of the environment before any child starts."""


SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Those that a server heeds; without a handler each of them would kill the process."""
DELIVERED_TURNS = 3
"""Of the event loop, until it has acted on a signal that came just before: it is read in one turn and acted on in the next."""


async def hold_signals() -> None:
    """From here to `heed_signals`, in this life or the next, signals wait. What has come before has been acted on."""
    await asyncio.get_running_loop().shutdown_default_executor()  # threads of their own would get what this one blocks
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for _ in range(DELIVERED_TURNS):
        await asyncio.sleep(0)


def heed_signals() -> None:
    """Call with the handlers in place: what has waited arrives at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@dataclass(frozen=True, slots=True)
class Handover:
    lock_fd: int
    listener_fd: int
    build: str | None = None
    """For whose sake it is; None when somebody asked. A build that is not found then is not looked for a second time."""


def take() -> Handover | None:
    """What the server before this one in this process has left; None in a process that begins."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        left = Handover(**json.loads(text))
        for fd in (left.lock_fd, left.listener_fd):
            os.set_inheritable(fd, False)
    except (ValueError, TypeError, OSError):
        return None  # somebody else has set the variable
    _bury()
    return left


def exec_again(left: Handover, argv: Sequence[str] | None = None) -> None:
    """Runs the same command line anew in this process. Returns only by raising OSError."""
    for fd in (left.lock_fd, left.listener_fd):
        os.set_inheritable(fd, True)
    os.environ[VARIABLE] = json.dumps(asdict(left))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *(argv or sys.orig_argv[1:])])


def _bury() -> None:
    """Children of the life before that ended after it are this process's own: nobody else will ask for their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
