"""One server after another in the same process: what a restart in place hands to its successor, and the step itself.

Lock and listening socket stay open across `exec`: no other server can come between, every connection attempt waits in the
socket's queue, and whoever keeps the service alive sees the same pid go on.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

VARIABLE = "OMLXD_HANDOVER"
"""From one life of the process to the next, and to nobody else: it is taken out of the environment before any child starts."""


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
