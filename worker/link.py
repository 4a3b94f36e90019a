"""The worker's main thread: the control socket, the lines to the gateways, heartbeats, and the end of the process.

Owns the order of a worker's life (hello, assign, load, joined, ready, stop, bye). What is served is a `Service`, one per kind;
must not know engines, tokenizers or MLX.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import zmq

from supervisor.build import build
from supervisor.child import ChildArgs
from supervisor.ipc import Frames, PeerLost, connect_dealer
from supervisor.protocol import (
    VERSION,
    Activity,
    AskTurn,
    Assign,
    Beat,
    Bye,
    Code,
    Explain,
    Explained,
    Fault,
    GatewayLost,
    GiveTurn,
    Grant,
    Hello,
    Join,
    LoadProgress,
    Message,
    Problem,
    ProtocolError,
    Ready,
    Stop,
    Trim,
    Turn,
    UnknownKind,
    Want,
    decode,
    encode,
)
from worker.faults import EXIT_UNLOADABLE
from worker.link_gateway import GatewayLink, Requests

BEAT_EVERY_S = 1.0
SIGTERM_FLUSH_S = 2.0
ORPHAN_FLUSH_S = 0.5
STOP_GRACE_S = 1.0
"""How much longer than its flush deadline a service may take to stop before the process leaves without it."""
LINGER_MS = 500

_log = logging.getLogger(__name__)


class Host(Protocol):
    """The process around a service, as the service sees it. Called on the event loop."""

    def progress(self, message: LoadProgress) -> None: ...

    def loaded(self, ready: Ready) -> None: ...

    def say(self, message: Want | Activity | AskTurn | GiveTurn) -> None:
        """To the supervisor, from a service that is ready."""
        ...

    def fail(self, code: str, message: str, exit_code: int) -> None:
        """The service is over, and with it the process."""
        ...


class Service(Requests, Protocol):
    """What a worker of one kind does. Called on the event loop, but for `flush`."""

    def start(self) -> None:
        """Begins to load; the outcome goes to the host."""
        ...

    def configure(self, settings: Mapping[str, object]) -> None:
        """The assignment's settings again, after a change."""
        ...

    def beat(self, seq: int) -> Beat: ...

    def grant(self, message: Grant | Turn) -> None: ...

    def trim(self, message: Trim) -> None: ...

    def explain(self, request_id: str) -> list[str]:
        """Why the cache had what it had of that request's prompt, in lines; none if it is not known here."""
        ...

    def refuse_new(self) -> None:
        """From now on every request, waiting or new, ends with `shutting_down`; what runs is ended by `flush`."""
        ...

    def fall_silent(self) -> None:
        """From now on no request is answered, waiting, running or new: gateways hear of the end from the supervisor, as after
        any death, and ask another worker where they may. Told by us they would ask this one again."""
        ...

    def flush(self, deadline_s: float) -> tuple[int, int]:
        """Ends what runs and saves what can be saved in that time; items saved and dropped. Blocks; any thread."""
        ...


class Link:
    def __init__(self, args: ChildArgs) -> None:
        self._args = args
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._service: Service | None = None
        self._gateways: list[GatewayLink] = []
        self._ready: Ready | None = None
        self._ready_sent = False
        self._stopping: asyncio.Task[None] | None = None
        self._beats = 0

    # ------------------------------------------------------------------ the process

    async def run(self) -> int:
        """Serves until told to stop; the exit status."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_signal_handler(signal.SIGTERM, self._terminated)
        self._control = connect_dealer(self._context, self._args.control, self._args.identity, self._on_frames)
        hello = Hello(v=VERSION, build=build(), nonce=self._args.nonce, pid=os.getpid(), rank=_rank(self._args.identity))
        self._say(hello)
        try:
            return await self._over
        finally:
            for gateway in self._gateways:
                gateway.close(LINGER_MS)
            self._control.close(LINGER_MS)
            self._context.term()

    def orphaned(self) -> None:
        """The supervisor is dead. Runs on the lifeline's thread; the process exits when it returns."""
        guard = threading.Timer(ORPHAN_FLUSH_S + STOP_GRACE_S, os._exit, [0])
        guard.daemon = True
        guard.start()
        if self._service is not None:
            self._service.flush(ORPHAN_FLUSH_S)

    def _terminated(self) -> None:
        """Not by the supervisor, or after it had asked in vain: the server lives on without this process."""
        if self._service is not None:
            self._service.fall_silent()
        self._stop("SIGTERM", SIGTERM_FLUSH_S)

    def _stop(self, reason: str, flush_deadline_s: float) -> None:
        if self._stopping is None:
            _log.info("stopping: %s", reason)
            self._stopping = self._loop.create_task(self._wind_down(flush_deadline_s))

    async def _wind_down(self, flush_deadline_s: float) -> None:
        flushed, dropped = 0, 0
        if self._service is not None:
            self._service.refuse_new()
            # A pool of its own: leaving the loop waits for the default one, and a flush may hang with the device.
            flush = self._loop.run_in_executor(ThreadPoolExecutor(1), self._service.flush, flush_deadline_s)
            try:
                flushed, dropped = await asyncio.wait_for(flush, flush_deadline_s + STOP_GRACE_S)
            except TimeoutError:
                _log.error("the engine did not stop within %.1f s; leaving without it", flush_deadline_s + STOP_GRACE_S)
            except Exception:  # the boundary of the last thing this process does
                _log.exception("stopping failed")
        self._say(Bye(flushed=flushed, dropped=dropped))
        self._end(0)

    def _say(self, message: Message) -> None:
        with contextlib.suppress(PeerLost):  # a DEALER's peer is only lost once our end is closed: we are leaving
            self._control.send(encode(message))

    def _end(self, exit_code: int) -> None:
        if not self._over.done():
            self._over.set_result(exit_code)

    # ------------------------------------------------------------------ the service's host

    def progress(self, message: LoadProgress) -> None:
        self._say(message)

    def loaded(self, ready: Ready) -> None:
        self._ready = ready
        self._say_ready()

    def say(self, message: Want | Activity | AskTurn | GiveTurn) -> None:
        self._say(message)

    def fail(self, code: str, message: str, exit_code: int) -> None:
        _log.error("%s: %s", code, message)
        self._say(Fault(code=code, message=message, fatal=True))
        self._end(exit_code)

    def _say_ready(self) -> None:
        """Only when loaded and welcome everywhere: a lease granted after this is always routable."""
        if self._ready is not None and not self._ready_sent and all(gateway.joined for gateway in self._gateways):
            self._ready_sent = True
            self._say(self._ready)

    # ------------------------------------------------------------------ the supervisor's messages

    def _on_frames(self, frames: Frames) -> None:
        try:
            message, _ = decode(frames)
        except UnknownKind as e:
            self._say(Problem(code=Code.UNKNOWN_KIND, message=str(e)))
            return
        except ProtocolError as e:
            _log.warning("from the supervisor: %s", e)
            return
        self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Assign():
                self._assign(message)
            case Stop():
                self._stop(message.reason, message.flush_deadline_s)
            case GatewayLost():
                for gateway in self._gateways:
                    gateway.lost()
            case Grant() | Turn() if self._service is not None:
                self._service.grant(message)
            case Trim() if self._service is not None:
                self._service.trim(message)
            case Explain() if self._service is not None:
                self._say(Explained(rid=message.rid, lines=self._service.explain(message.rid)))
            case Grant() | Turn() | Trim() | Explain():
                _log.info("%s before assign: nothing to apply it to", message.KIND)
            case Problem():
                _log.warning("the supervisor says %s: %s", message.code, message.message)
            case _:
                self._say(Problem(code=Code.UNKNOWN_KIND, message=f"a worker does not take {message.KIND}"))

    def _assign(self, assign: Assign) -> None:
        if self._service is not None:
            self._service.configure(assign.settings)  # they changed, and some take effect at once
            return
        self._service = self._service_for(assign)
        if self._service is None:
            self.fail(Code.UNSUPPORTED, f"this build has no worker of kind {assign.kind!r}", EXIT_UNLOADABLE)
            return
        join = Join(
            v=VERSION,
            build=build(),
            worker=self._args.identity,
            model=assign.model.id if assign.model is not None else "",
            nonce=self._args.nonce,
        )
        self._gateways = [
            GatewayLink(self._context, endpoint, join, self._service, self._say_ready) for endpoint in assign.data_endpoints
        ]
        self._service.start()
        self._beat()

    def _service_for(self, assign: Assign) -> Service | None:
        """Imported here: the text worker has no use for an engine, nor an engine for a cache of tokenizers."""
        if assign.kind != "text":
            return None
        if assign.model is None:
            from worker.text_worker import TextService

            return TextService(assign.settings, self)
        from worker.link_model import ModelService

        return ModelService(assign, assign.model, self)

    def _beat(self) -> None:
        if self._service is not None and not self._over.done():
            self._loop.call_later(BEAT_EVERY_S, self._beat)  # first: one that fails must not be the last
            self._beats += 1
            self._say(self._service.beat(self._beats))


def _rank(identity: str) -> int:
    """Workers are called w.<slot>.<gen>.<rank>; whoever has no rank is alone."""
    parts = identity.split(".")
    return int(parts[3]) if parts[0] == "w" and len(parts) == 4 and parts[3].isdigit() else 0
