"""A supervisor and a gateway that do what a test says, for a real worker process between them.

They bind real sockets, start `python -P -m worker` as the supervisor does, and keep everything it says in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import zmq

from supervisor.ipc import Frames, Wire, bind_router
from supervisor.protocol import (
    Accepted,
    Assign,
    Cancel,
    Hello,
    Join,
    Message,
    ModelRef,
    Problem,
    Prompt,
    Ready,
    Rows,
    Submit,
    Usage,
    Welcome,
    decode,
    encode,
)
from tests.stands.patience import patient_s

PATIENCE_S = 30.0
M = TypeVar("M", bound=Message)


class Router:
    """A bound ROUTER that records what comes in."""

    def __init__(self, path: Path, story: list[Message]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.story = story
        self.unread: list[Message] = []
        self._arrived = asyncio.Event()
        self._wire: Wire = bind_router(self.context, path, self._on_frames)
        self.peer = b""

    def _on_frames(self, frames: Frames) -> None:
        self.peer = frames[0]
        message, _ = decode(frames[1:])
        self.story.append(message)
        self.unread.append(message)
        self.react(message)
        self._arrived.set()

    def react(self, message: Message) -> None:
        """What it answers by itself."""

    def send(self, message: Message) -> None:
        self._wire.send([self.peer, *encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self._wire.send([self.peer, *frames])

    async def expect(self, kind: type[M], where: Callable[[M], bool] = lambda _: True, within_s: float = PATIENCE_S) -> M:
        """The first unread message of that kind; what came before it counts as read."""
        until = time.monotonic() + patient_s(within_s)
        while True:
            for at, message in enumerate(self.unread):
                if isinstance(message, kind) and where(message):
                    del self.unread[: at + 1]
                    return message
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, until - time.monotonic()))
            except TimeoutError:
                said = [message.KIND for message in self.story]
                raise AssertionError(f"no {kind.__name__} within {within_s} s; so far: {said}") from None

    def close(self) -> None:
        self._wire.close()
        self.context.destroy(linger=0)


class ScriptedGateway(Router):
    """Welcomes whoever joins."""

    def __init__(self, path: Path, story: list[Message], epoch: str = "epoch-1") -> None:
        self.epoch = epoch
        self.welcoming = True
        self._rids = 0
        super().__init__(path, story)

    def react(self, message: Message) -> None:
        if isinstance(message, Join) and self.welcoming:
            self.send(Welcome(epoch=self.epoch))

    def submit(self, prompt: Prompt | str, rid: str = "", task: str = "complete", **fields: object) -> str:
        self._rids += 1
        rid = rid or f"r{self._rids}"
        given = Prompt(text=prompt) if isinstance(prompt, str) else prompt
        values: dict[str, object] = {"epoch": self.epoch, "rid": rid, "task": task, "prompt": given, **fields}
        self.send(Submit(**values))  # pyright: ignore
        return rid

    def cancel(self, rid: str) -> None:
        self.send(Cancel(epoch=self.epoch, rid=rid))

    async def answer(self, rid: str) -> Answer:
        """Everything up to the last row or the problem; messages for other requests stay unread."""
        answer = Answer()
        until = time.monotonic() + patient_s(PATIENCE_S)
        while answer.finish is None and answer.problem is None:
            for message in list(self.unread):
                if answer.take(rid, message):
                    self.unread.remove(message)
            if answer.finish is None and answer.problem is None:
                self._arrived.clear()
                await asyncio.wait_for(self._arrived.wait(), max(0.0, until - time.monotonic()))
        return answer


class Answer:
    """One request's outcome, put together from the messages about it. Tests submit one request per `rows` they look at."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.problem: Problem | None = None
        self.finish: str | None = None
        self.stop_string: str | None = None
        self.text = ""
        self.tokens = 0
        self.seqs: list[int] = []
        self.usage: Usage | None = None

    def take(self, rid: str, message: Message) -> bool:
        if isinstance(message, Accepted) and message.rid == rid:
            self.accepted = message
            return True
        if isinstance(message, Problem) and message.rid == rid:
            self.problem = message
            return True
        return isinstance(message, Rows) and self._take_rows(rid, message)

    def _take_rows(self, rid: str, message: Rows) -> bool:
        for row in message.rows:
            if row.rid == rid and row.seq == len(self.seqs):
                self.seqs.append(row.seq)
                self.text += "".join(piece.text for piece in row.pieces)
                self.tokens, self.finish, self.stop_string = row.tokens, row.finish, row.stop_string
                self.usage = row.usage
        return all(row.rid == rid for row in message.rows)


class ScriptedSupervisor(Router):
    """Starts one worker and answers its hello with `assign`."""

    def __init__(self, run: Path, assign: Callable[[str], Assign], identity: str = "w.0.1.0") -> None:
        self.run = run
        self.nonce = "nonce-1"
        self.identity = identity
        self._assign = assign
        super().__init__(run / "control.sock", [])
        self.process: subprocess.Popen[bytes] | None = None
        self.lifeline = -1

    @property
    def data_socket(self) -> Path:
        return self.run / "data.sock"

    def start(self) -> None:
        read_end, self.lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", "worker", "--control", f"ipc://{self.run / 'control.sock'}"]
        command += ["--identity", self.identity, "--nonce", self.nonce, "--lifeline-fd", str(read_end)]
        with (self.run / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(command, pass_fds=[read_end], stderr=stderr, cwd=self.run)
        os.close(read_end)

    def react(self, message: Message) -> None:
        if isinstance(message, Hello):
            self.send(self._assign(f"ipc://{self.data_socket}"))

    def cut_lifeline(self) -> None:
        os.close(self.lifeline)
        self.lifeline = -1

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def exit_code(self, within_s: float = 10.0) -> int:
        assert self.process is not None
        until = time.monotonic() + patient_s(within_s)
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until, f"the worker did not exit within {within_s} s"
            await asyncio.sleep(0.01)
        return code

    @property
    def stderr(self) -> str:
        return (self.run / "stderr").read_text(errors="replace")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
        super().close()


@contextlib.asynccontextmanager
async def supervised(assign: Callable[[str], Assign], identity: str = "w.0.1.0") -> AsyncIterator[ScriptedSupervisor]:
    """A supervisor whose worker has just been started."""
    run = Path(tempfile.mkdtemp(prefix="omx", dir="/tmp"))  # short: ipc paths are limited
    supervisor = ScriptedSupervisor(run, assign, identity)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.close()
        shutil.rmtree(run, ignore_errors=True)


@contextlib.asynccontextmanager
async def serving(
    assign: Callable[[str], Assign], identity: str = "w.0.1.0"
) -> AsyncIterator[tuple[ScriptedSupervisor, ScriptedGateway]]:
    """Supervisor and gateway around a worker that has said ready."""
    async with supervised(assign, identity) as supervisor:
        gateway = ScriptedGateway(supervisor.data_socket, supervisor.story)
        try:
            await supervisor.expect(Ready)
            yield supervisor, gateway
        finally:
            gateway.close()


def assign_model(path: Path, **fields: object) -> Callable[[str], Assign]:
    def assign(endpoint: str) -> Assign:
        model = ModelRef(id="tiny", path=str(path), context=0)
        values: dict[str, object] = {"kind": "text", "gen": 1, "data_endpoints": [endpoint], "model": model, **fields}
        return Assign(**values)  # pyright: ignore

    return assign


def assign_text_worker(endpoint: str) -> Assign:
    return Assign(kind="text", gen=1, data_endpoints=[endpoint])
