"""The listening socket, bound here: a gateway that dies loses no connection attempt, and a taken port is known at once."""

import contextlib
import errno
import socket
from typing import cast

import psutil

BACKLOG = 1024


class PortTaken(Exception):
    """Somebody else listens there; the port is never changed silently."""

    def __init__(self, host: str, port: int, pid: int | None, name: str | None) -> None:
        holder = f"process {pid} ({name})" if pid else "another process"
        super().__init__(
            f"{host}:{port} is already in use by {holder}; stop it, or choose another port with --port or OMLX_PORT"
        )
        self.pid = pid


class AddressUnusable(Exception):
    """The host does not resolve or is not an address of this machine."""


def bind(host: str, port: int, inherited: int | None = None) -> socket.socket:
    """`inherited` is the listener of this process's life before; it is kept while it is the one that is wanted.

    Raises `PortTaken` or `AddressUnusable`.
    """
    family, address = _resolved(host, port)
    if inherited is not None:
        kept = socket.socket(fileno=inherited)
        name = cast("tuple[str, int]", kept.getsockname()[:2])
        if kept.family == family and name[0] == address[0] and port in (0, name[1]):
            return kept
        kept.close()
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(host, port, *(_holder(port) or (None, None))) from e
        raise AddressUnusable(f"{host}:{port} cannot be listened on: {e.strerror}") from e
    listener.setblocking(False)
    return listener


def _resolved(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as e:
        raise AddressUnusable(f"{host} cannot be listened on: {e.strerror}") from e
    # A name may stand for both: clients that are told 127.0.0.1 must reach "localhost".
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, cast("tuple[str, int]", address)


def _holder(port: int) -> tuple[int, str] | None:
    """Pid and name of who listens on `port`, where the system lets us see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.pid:
                continue
            if cast("tuple[str, int]", connection.laddr)[1] == port:
                return connection.pid, psutil.Process(connection.pid).name()
    return None
