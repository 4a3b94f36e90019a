"""The gateway's end of control.sock: it reports for duty, keeps the feed and the settings current, and asks for leases.

What becomes of a lease is for the `LeaseHolder`; this file knows nothing of workers' data.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec
import zmq

from gateway.config import GatewayConfig, gateway_config
from gateway.feed import TOPICS, Feed
from gateway.records import Records
from supervisor.build import build
from supervisor.child import ChildArgs
from supervisor.ipc import Frames, connect_dealer
from supervisor.protocol import (
    VERSION,
    Abandon,
    Acquire,
    Assign,
    Call,
    Event,
    GatewayBeat,
    Granted,
    Hello,
    Lost,
    Message,
    Problem,
    ProtocolError,
    Queued,
    Rejected,
    Release,
    Reply,
    Snapshot,
    Stop,
    Trace,
    Traced,
    UnknownKind,
    Watch,
    decode,
    encode,
)

log = logging.getLogger(__name__)


class LeaseHolder(Protocol):
    def granted(self, message: Granted) -> None: ...
    def rejected(self, message: Rejected) -> None: ...
    def lost(self, message: Lost) -> None: ...
    def queued(self, message: Queued) -> None: ...


class Control:
    def __init__(self, args: ChildArgs, context: "zmq.Context[zmq.Socket[bytes]]", records: Records) -> None:
        self._records = records
        self.identity = args.identity
        self.config = GatewayConfig()
        self.feed = Feed()
        self.stopped = asyncio.Event()
        self._holder: LeaseHolder | None = None
        loop = asyncio.get_running_loop()
        self._assigned: asyncio.Future[Assign] = loop.create_future()
        self._fed: asyncio.Future[None] = loop.create_future()
        self._calls: dict[str, asyncio.Future[Reply]] = {}
        self._wire = connect_dealer(context, args.control, args.identity, self._on_frames)
        self._send(Hello(v=VERSION, build=build(), nonce=args.nonce, pid=os.getpid()))

    async def assigned(self) -> Assign:
        return await self._assigned

    async def watch(self, holder: LeaseHolder) -> None:
        """From here on `holder` hears of its leases; returns once the first snapshot is there."""
        self._holder = holder
        self._send(Watch(topics=list(TOPICS)))
        await self._fed

    def acquire(self, rid: str, model: str, request_hash: str, priority: int, deadline_ms: int | None) -> None:
        acquire = Acquire(rid=rid, model=model, request_hash=request_hash, priority=priority, deadline_ms=deadline_ms)
        self._send(acquire)

    def abandon(self, rid: str) -> None:
        self._send(Abandon(rid=rid))

    def release(self, lease: str, outcome: str, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        self._send(Release(lease=lease, outcome=outcome, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens))

    def beat(self, inflight: int, models: Collection[str]) -> None:
        self._send(GatewayBeat(inflight=inflight, models=sorted(models)))

    async def call(self, verb: str, args: Mapping[str, object]) -> Reply:
        """One admin verb of the supervisor, however long it takes."""
        call = Call(id=secrets.token_hex(8), verb=verb, args=dict(args), build=build())
        reply = self._calls[call.id] = asyncio.get_running_loop().create_future()
        self._send(call)
        try:
            return await reply
        finally:
            del self._calls[call.id]

    def close(self) -> None:
        self._wire.close(linger_ms=200)

    def _send(self, message: Message) -> None:
        self._wire.send(encode(message))

    def _on_frames(self, frames: Frames) -> None:
        try:
            message, _ = decode(frames)
        except UnknownKind as e:
            self._send(Problem(code="unknown_kind", message=str(e)))
            return
        except ProtocolError as e:
            log.warning("control.sock: %s", e)
            return
        self._on_message(message)

    def _on_message(self, message: Message) -> None:
        holder = self._holder
        match message:
            case Assign():
                self._assign(message)
            case Snapshot():
                self.feed.snapshot(message)
                if not self._fed.done():
                    self._fed.set_result(None)
            case Event():
                self.feed.event(message)
            case Granted() if holder:
                holder.granted(message)
            case Rejected() if holder:
                holder.rejected(message)
            case Lost() if holder:
                holder.lost(message)
            case Reply():
                if (waiting := self._calls.get(message.id)) is not None and not waiting.done():
                    waiting.set_result(message)
            case Queued() if holder:
                holder.queued(message)
            case Trace():
                self._send(Traced(call=message.call, requests=self._records.find(message.rid)))
            case Stop():
                self.stopped.set()
            case Problem():
                log.warning("the supervisor did not understand us: %s", message.message)
            case _:
                log.warning("control.sock: %s is not for a gateway", message.KIND)

    def _assign(self, message: Assign) -> None:
        try:
            self.config = gateway_config(message.settings)
        except msgspec.ValidationError as e:
            log.error("settings not applied: %s", e)
        logging.getLogger().setLevel(self.config.log_level.upper())
        if not self._assigned.done():
            self._assigned.set_result(message)
