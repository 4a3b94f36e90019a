"""ZeroMQ over ipc as every process here uses it: bind or connect, receive on the event loop, send without ever waiting.

Sends go to the plain socket with NOBLOCK: an awaited send to one full peer would hold up every later send to the others. The
socket's descriptor is edge-triggered and a send may swallow the edge of a message that arrived meanwhile, so after every send
the socket is asked whether there is one.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
ROUTER_HWM_MESSAGES = 20_000
"""A peer that lets this many messages pile up is stuck; the byte size of one is bounded by the HTTP body limit."""

_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE_NOBLOCK = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: with pyzmq's own a tenth of what a token costs outside the engine was `enum`, before Python 3.12 at least."""

Frames = list[bytes]


class PeerLost(Exception):
    """A ROUTER has no peer of that identity."""


class PeerStuck(Exception):
    """A peer does not read; its queue is full."""


class PathTooLong(Exception):
    """The run directory is too deep for an ipc socket."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is {len(os.fsencode(path))} bytes long; ipc sockets allow {MAX_PATH_BYTES}. "
            "Set a shorter one with run_dir in settings.json or OMLX_RUN_DIR."
        )
        self.path = path


class BindFailed(Exception):
    """The socket file cannot be made there."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} cannot be bound: {reason}; choose another place with run_dir in settings.json or OMLX_RUN_DIR"
        )


def endpoint(path: Path) -> str:
    """The ipc endpoint of a socket file; raises `PathTooLong`."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise PathTooLong(path)
    return f"ipc://{path}"


class Wire:
    """One socket on one event loop. Frames arrive through `on_frames`; a ROUTER's start with the peer's identity.

    `send` may be called from any thread: ZeroMQ lets sockets change threads as long as no two are in one at the same time.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._look_scheduled = False
        self._closed = False
        self._one_thread = threading.Lock()  # guards _socket and _closed, never held while a handler runs
        self._home_thread = threading.get_ident()
        self._fd: int = socket.getsockopt(zmq.FD)  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
        self._loop.add_reader(self._fd, self._drain)
        self._look_again()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queues `frames`, never waits. Raises `PeerLost` or `PeerStuck`."""
        try:
            with self._one_thread:
                if self._closed:
                    raise PeerLost("closed")
                for frame in frames[:-1]:
                    self._socket.send(frame, _MORE_NOBLOCK)
                self._socket.send(frames[-1], _NOBLOCK)
        except zmq.Again as e:
            raise PeerStuck(frames[0]) from e
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                raise PeerLost(frames[0]) from e
            raise
        finally:
            if self._has_mail():
                self._look_again()

    def close(self, linger_ms: int = 0) -> None:
        with self._one_thread:
            if not self._closed:
                self._closed = True
                self._loop.remove_reader(self._fd)
                self._socket.close(linger_ms)

    def _look_again(self) -> None:
        if not self._look_scheduled and not self._closed:
            self._look_scheduled = True
            if threading.get_ident() == self._home_thread:
                self._loop.call_soon(self._scheduled_look)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to look
                    self._loop.call_soon_threadsafe(self._scheduled_look)

    def _scheduled_look(self) -> None:
        self._look_scheduled = False
        self._drain()

    def _drain(self) -> None:
        """There is no second edge for what is left lying, so an error in a handler must not end the looking."""
        done = False
        try:
            for _ in range(256):  # then let the loop breathe
                if not self._has_mail() or (frames := self._receive()) is None:
                    done = True
                    return
                self._on_frames(frames)
        finally:
            if not done:
                self._look_again()

    def _has_mail(self) -> bool:
        """Asking also takes notice of whatever the descriptor has announced, and costs less than a receive in vain."""
        with self._one_thread:
            if self._closed:
                return False
            events: int = self._socket.getsockopt(zmq.EVENTS)  # pyright: ignore[reportAssignmentType]  # bytes for others only
        return bool(events & _POLLIN)

    def _receive(self) -> Frames | None:
        with self._one_thread:
            try:
                return None if self._closed else self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:  # its sender went away that very moment
                return None


def bind_router(context: zmq.Context[zmq.Socket[bytes]], path: Path, on_frames: Callable[[Frames], None]) -> Wire:
    """A ROUTER on `path`, reachable by this user only.

    The caller must hold the instance lock: a second bind on a live ipc path succeeds and silently steals it.
    Raises `BindFailed`.
    """
    where = endpoint(path)
    socket = context.socket(zmq.ROUTER)
    with contextlib.suppress(zmq.ZMQError):  # where the system tells a socket who its peer is: this user only
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, ROUTER_HWM_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 0)
    old = os.umask(0o177)
    try:
        socket.bind(where)
    except (OSError, zmq.ZMQError) as e:
        socket.close(0)
        raise BindFailed(path, e.strerror or str(e)) from e
    finally:
        os.umask(old)
    return Wire(socket, on_frames)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], where: str, identity: str, on_frames: Callable[[Frames], None]
) -> Wire:
    """A DEALER known to its peer as `identity`; reconnects by itself when the peer comes back."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(where)
    return Wire(socket, on_frames)
