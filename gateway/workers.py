"""The gateway's end of data.sock: who has joined, and messages to and from them. Knows no requests.

`epoch` is new per gateway life: a worker that sees a new one drops what an older gateway asked for, and what it still says
about that is dropped here.
"""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import zmq

from supervisor.ipc import Frames, PeerLost, PeerStuck, bind_router
from supervisor.protocol import (
    VERSION,
    Accepted,
    Code,
    Join,
    Message,
    Problem,
    ProtocolError,
    Result,
    Rows,
    UnknownKind,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

WorkerMessage = Accepted | Rows | Result | Problem


class Workers:
    def __init__(self, data_socket: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.epoch = secrets.token_hex(8)
        self.text_worker: str | None = None
        """The one that counts tokens without weights, once it has joined."""
        self.on_join: Callable[[str], None] = _ignore
        self.on_message: Callable[[str, WorkerMessage], None] = _ignore
        self._joined: set[str] = set()
        self._wire = bind_router(context, data_socket, self._on_frames)

    def has_joined(self, worker: str) -> bool:
        return worker in self._joined

    def forget(self, worker: str) -> None:
        self._joined.discard(worker)
        if worker == self.text_worker:
            self.text_worker = None

    def send(self, worker: str, message: Message) -> bool:
        """False if the worker cannot be reached; it is forgotten then, until it joins again."""
        try:
            self._wire.send([worker.encode(), *encode(message)])
        except (PeerLost, PeerStuck) as e:
            log.warning("%s not sent to %s: %s", message.KIND, worker, type(e).__name__)
            self.forget(worker)
            return False
        return True

    def close(self) -> None:
        self._wire.close(linger_ms=200)

    def _on_frames(self, frames: Frames) -> None:
        peer = frames[0].decode("utf-8", "replace")
        try:
            message, _ = decode(frames[1:])
        except UnknownKind as e:
            self.send(peer, Problem(code=Code.UNKNOWN_KIND, message=str(e)))
            return
        except ProtocolError as e:
            log.warning("data.sock: %s: %s", peer, e)
            return
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, WorkerMessage):
            if message.epoch == self.epoch:
                self.on_message(peer, message)
        else:
            log.warning("data.sock: %s sent %s", peer, message.KIND)

    def _join(self, peer: str, message: Join) -> None:
        if message.v != VERSION:
            self.send(peer, Problem(code=Code.VERSION_MISMATCH, message=f"this gateway speaks version {VERSION}"))
            return
        if not self.send(peer, Welcome(epoch=self.epoch)):
            return
        if message.model:
            self._joined.add(peer)
        else:
            self.text_worker = peer
        self.on_join(peer)


def _ignore(*_: object) -> None:
    """Until the link listens."""
