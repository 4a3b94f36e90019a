"""`omlxctl serve` from the lock to the last child's exit: what is refused before anything starts, and where the log goes."""

import asyncio
import logging
import os
import socket
import sys
from typing import cast

from supervisor import breadcrumb, handover, ipc
from supervisor.build import build
from supervisor.census import end_survivors
from supervisor.handover import Handover
from supervisor.http_port import AddressUnusable, PortTaken, bind
from supervisor.instance import AlreadyRunning, InstanceLock
from supervisor.logs import BookHandler, LogBook
from supervisor.paths import HomeUnusable, Paths, paths_of, prepare
from supervisor.restarting import Again, End
from supervisor.settings import Settings
from supervisor.settings_load import Loaded
from supervisor.shell import Supervisor

log = logging.getLogger("omlxd")


STAYS = (AlreadyRunning, PortTaken)
"""Why a server does not start that starting it again would not change."""


def run(loaded: Loaded, *, as_service: bool = False) -> int:
    """Serves until asked to stop. Returns the exit code; says why when it refuses.

    A service manager starts again whatever ends with another code than 0: `as_service` says 0 where that would not help.
    """
    os.umask(0o077)  # sockets, logs and KV blocks are for this user only
    paths = paths_of(loaded.home, loaded.settings)
    left = handover.take()
    try:
        prepare(paths)
        lock = InstanceLock(paths.lock, left.lock_fd if left else None)
    except (HomeUnusable, ipc.PathTooLong, AlreadyRunning) as e:
        return _refuse(e, as_service)
    try:
        return _run_locked(loaded, paths, lock, left, as_service)
    except (PortTaken, AddressUnusable, ipc.BindFailed) as e:
        return _refuse(e, as_service)
    finally:
        lock.release()


def _run_locked(loaded: Loaded, paths: Paths, lock: InstanceLock, left: Handover | None, as_service: bool) -> int:
    survivors = end_survivors(paths.children)  # before the port is bound: a stuck gateway of a killed server holds it
    server = loaded.settings.server
    listener = bind(server.host, server.port, left.listener_fd if left else None)
    try:
        book = _start_logging(loaded.settings, paths, as_service)
        for pid in survivors:
            log.warning("process %d had outlived the server that started it and was killed", pid)
        if (last_words := breadcrumb.found(paths.breadcrumb)) is not None:
            log.warning("%s", last_words)
        host, port = cast("tuple[str, int]", listener.getsockname()[:2])
        log.info("omlxd %s on http://%s:%d, home %s", build(), host, port, paths.home)
        end = asyncio.run(_serve(loaded, paths, listener, book, left))
        return _again(end.again, lock, listener) if end.again is not None else end.exit_code
    finally:
        listener.close()


def _again(again: Again, lock: InstanceLock, listener: socket.socket) -> int:
    try:
        handover.exec_again(Handover(lock.fd, listener.fileno(), again.build))
    except OSError as e:
        sys.stderr.write(f"omlxd: {sys.executable} could not be started again: {e}\n")
    return 1


async def _serve(loaded: Loaded, paths: Paths, listener: socket.socket, book: LogBook, left: Handover | None) -> End:
    return await Supervisor(loaded, paths, listener, book, left.build if left else None).serve()


def _refuse(reason: Exception, as_service: bool) -> int:
    sys.stderr.write(f"omlxd: {reason}\n")
    return 0 if as_service and isinstance(reason, STAYS) else 1


def _start_logging(settings: Settings, paths: Paths, as_service: bool) -> LogBook:
    book = LogBook("omlxd", paths.logs)
    terminal = logging.StreamHandler()
    if as_service:  # its standard error is a file that nobody rotates; the log book holds everything
        terminal.setLevel(logging.WARNING)
    terminal.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[terminal, BookHandler(book)])
    return book
