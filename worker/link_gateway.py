"""A worker's line to one gateway: joins until it is welcome, then passes requests of that gateway's life and no other.

A gateway that restarts binds the same path and the socket reconnects by itself, but the new one knows nobody: after `lost` the
worker joins again until an epoch it has not seen answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import zmq

from supervisor.ipc import Frames, PeerLost, connect_dealer
from supervisor.protocol import (
    Cancel,
    Code,
    Join,
    Message,
    Problem,
    ProtocolError,
    Submit,
    UnknownKind,
    Welcome,
    decode,
    encode,
)

JOIN_EVERY_S = 0.5

_log = logging.getLogger(__name__)


class Requests(Protocol):
    """Who serves what a gateway asks for."""

    def submit(self, gateway: "GatewayLink", message: Submit) -> None: ...

    def cancel(self, rid: str) -> None: ...

    def drop(self, gateway: "GatewayLink") -> None:
        """Ends that gateway's requests; nobody listens for their rows."""
        ...


class GatewayLink:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        join: Join,
        requests: Requests,
        on_welcome: Callable[[], None],
    ) -> None:
        self._join = join
        self._requests = requests
        self._on_welcome = on_welcome
        self._epoch = ""
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._complaint = ""
        self._loop = asyncio.get_running_loop()
        self._wire = connect_dealer(context, endpoint, join.worker, self._on_frames)
        self._ask_in()

    @property
    def epoch(self) -> str:
        """The life of the gateway that we serve; empty before the first welcome."""
        return self._epoch

    @property
    def joined(self) -> bool:
        return bool(self._epoch) and not self._lost

    def send(self, message: Message) -> None:
        with contextlib.suppress(PeerLost):  # a DEALER's peer is only lost once our end is closed: we are leaving
            self._wire.send(encode(message))

    def lost(self) -> None:
        """The gateway is dead: nobody wants the rows of its requests."""
        self._lost = True
        self._requests.drop(self)
        self._ask_in()

    def close(self, linger_ms: int) -> None:
        """What was said last gets so long to arrive; asking to be let in, where nobody does so, is not waited for."""
        self._stop_asking()
        self._wire.close(linger_ms if self.joined else 0)

    def _ask_in(self) -> None:
        self._stop_asking()
        self.send(self._join)
        self._timer = self._loop.call_later(JOIN_EVERY_S, self._ask_in)

    def _stop_asking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_frames(self, frames: Frames) -> None:
        try:
            message, _ = decode(frames)
        except UnknownKind as e:
            self.send(Problem(code=Code.UNKNOWN_KIND, message=str(e), epoch=self._epoch))
            return
        except ProtocolError as e:
            _log.warning("from a gateway: %s", e)
            return
        match message:
            case Welcome():
                self._welcome(message.epoch)
            case Submit() if self._is_current(message.epoch):
                self._requests.submit(self, message)
            case Cancel() if self._is_current(message.epoch):
                self._requests.cancel(message.rid)
            case Submit() | Cancel():
                _log.info("dropped a %s of another epoch", message.KIND)
            case Problem():
                self._complain(message)
            case _:
                self.send(Problem(code=Code.UNKNOWN_KIND, message=f"a worker does not take {message.KIND}", epoch=self._epoch))

    def _is_current(self, epoch: str) -> bool:
        return self.joined and epoch == self._epoch

    def _welcome(self, epoch: str) -> None:
        if self._lost and epoch == self._epoch:
            return  # the dead gateway's last words
        if self._epoch and epoch != self._epoch:
            self._requests.drop(self)
        _log.debug("joined the gateway's life %s", epoch)
        self._epoch, self._lost = epoch, False
        self._stop_asking()
        self._on_welcome()

    def _complain(self, problem: Problem) -> None:
        """Joining goes on, so the same answer comes twice a second: say it once."""
        if problem.message != self._complaint:
            self._complaint = problem.message
            _log.warning("a gateway says %s: %s", problem.code, problem.message)
