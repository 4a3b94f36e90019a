"""A supervisor that does what a test says: it starts the real gateway, greets it, and grants, queues or rejects on demand.

Everything the gateway sends is kept, so that a test can wait for a message or assert that none came.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from supervisor.ipc import Frames, PeerLost, Wire, bind_router, endpoint
from supervisor.protocol import (
    Acquire,
    Assign,
    Call,
    Event,
    EventKind,
    Granted,
    Hello,
    Lost,
    Message,
    Release,
    Reply,
    ServerStatus,
    SlotStatus,
    Snapshot,
    Stop,
    Watch,
    decode,
    encode,
    plain,
)
from tests.stands.patience import patient_s

M = TypeVar("M", bound=Message)
NONCE = "n0nce"
WORKER = "w.tiny.1.0"


def slot(model: str = "tiny", state: str = "ready", **more: object) -> SlotStatus:
    facts: dict[str, object] = {"path": f"/models/{model}", "context": 4096, "created": 1_700_000_000.0, **more}
    return SlotStatus(id=model, state=state, **facts)  # pyright: ignore[reportArgumentType]


class ScriptedSupervisor:
    def __init__(self, models: Sequence[SlotStatus], settings: dict[str, object]) -> None:
        self.models = list(models)
        self.settings = settings
        self.run_dir = Path(tempfile.mkdtemp(prefix="omx", dir="/tmp"))
        self.data = self.run_dir / "data.sock"
        self.warnings: list[str] = []
        self.more: dict[str, object] = {}
        """Of its status."""
        self.answers_calls = True
        self.received: list[Message] = []
        self.granted: list[Granted] = []
        self.on_acquire: Callable[[Acquire], Message | None] = self.grant
        self.defaults: dict[str, object] = {}
        self.gateway: asyncio.subprocess.Process | None = None
        self.identity = ""
        self._leases = 0
        self._seq = 1
        self._generation = 0
        self._arrived = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wire: Wire = bind_router(self._context, self.run_dir / "control.sock", self._on_frames)
        self._http = socket.create_server(("127.0.0.1", 0))
        self._lifeline: int | None = None

    @property
    def port(self) -> int:
        return self._http.getsockname()[1]

    async def start_gateway(self) -> None:
        """Its predecessor, if any, must be gone. Whoever connects before it serves is let wait by the kernel."""
        self._generation += 1
        self.identity = f"g.{self._generation}"
        read_fd, self._lifeline = os.pipe()
        control = endpoint(self.run_dir / "control.sock")
        command = [sys.executable, "-P", "-m", "gateway", "--control", control, "--identity", self.identity]
        fds = ["--nonce", NONCE, "--http-fd", str(self._http.fileno()), "--lifeline-fd", str(read_fd)]
        self.gateway = await asyncio.create_subprocess_exec(*command, *fds, pass_fds=(self._http.fileno(), read_fd))
        os.close(read_fd)

    async def stop(self) -> None:
        if self.gateway is not None and self.gateway.returncode is None:
            self.gateway.kill()
            await self.gateway.wait()
        self.cut_lifeline()
        self._wire.close()
        self._http.close()
        self._context.term()
        shutil.rmtree(self.run_dir)

    def cut_lifeline(self) -> None:
        """What the gateway sees when its supervisor dies."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def signal_gateway(self, number: signal.Signals) -> None:
        assert self.gateway is not None
        self.gateway.send_signal(number)

    # ------------------------------------------------------------------ towards the gateway

    def send(self, message: Message) -> None:
        self._wire.send([self.identity.encode(), *encode(message)])

    def grant(self, acquire: Acquire, worker: str = WORKER) -> Granted:
        self._leases += 1
        lease = f"lease{self._leases}"
        return Granted(rid=acquire.rid, lease=lease, worker=worker, model=acquire.model, defaults=self.defaults)

    def lose(self, rid: str, code: str = "worker_lost") -> None:
        lease = next(g.lease for g in reversed(self.granted) if g.rid == rid)
        self.send(Lost(lease=lease, rid=rid, code=code, message="The worker is gone."))

    def change(self, model: str, status: SlotStatus | None) -> None:
        self._seq += 1
        self.send(Event(seq=self._seq, ts=0.0, kind=EventKind.SLOT, model=model, status=status))

    def assign(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.send(Assign(kind="gateway", gen=0, data_endpoints=[endpoint(self.data)], settings=settings))

    def order_stop(self) -> None:
        self.send(Stop(reason="test", flush_deadline_s=2.0))

    # ------------------------------------------------------------------ from the gateway

    @property
    def all_acquired(self) -> list[Acquire]:
        return self.all(Acquire)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1, timeout_s: float = 60.0) -> list[M]:
        """At least `count` messages of that kind since the start."""
        async with asyncio.timeout(patient_s(timeout_s)):
            while len(found := self.all(kind)) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return found

    async def outcomes(self, count: int = 1) -> list[str]:
        return [release.outcome for release in await self.wait_for(Release, count)]

    def _on_frames(self, frames: Frames) -> None:
        peer = frames[0].decode()
        message, _ = decode(frames[1:])
        self.received.append(message)
        self._arrived.set()
        if peer != self.identity:
            return
        with contextlib.suppress(PeerLost):  # it was killed meanwhile
            self._answer(message)

    def _status(self) -> ServerStatus:
        status = ServerStatus(
            version="1.2.3", build="b", pid=os.getpid(), started=0.0, host="127.0.0.1", port=self.port, home="/home",
            budget_bytes=1, charged_bytes=0, models=self.models, warnings=self.warnings,
        )  # fmt: skip
        return msgspec.structs.replace(status, **self.more)

    def _answer(self, message: Message) -> None:
        match message:
            case Hello():
                assert message.nonce == NONCE
                self.assign(self.settings)
            case Watch():
                self.send(Snapshot(seq=self._seq, status=self._status()))
            case Call(verb="status") if self.answers_calls:
                self.send(Reply(id=message.id, ok=True, result=plain(self._status())))  # pyright: ignore[reportArgumentType]
            case Acquire():
                answer = self.on_acquire(message)
                if isinstance(answer, Granted):
                    self.granted.append(answer)
                if answer is not None:
                    self.send(answer)
            case _:
                pass
