"""A worker that answers as a test scripts it: tokens with delays, errors, silence, or sudden death.

A script is a coroutine over one submit; it runs as a task that `cancel` does not touch unless the script says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from supervisor.ipc import Frames, Wire, connect_dealer, endpoint
from supervisor.protocol import (
    VERSION,
    Accepted,
    Cancel,
    FinishReason,
    Join,
    Message,
    Piece,
    Problem,
    Result,
    Row,
    Rows,
    Submit,
    Usage,
    Welcome,
    decode,
    encode,
)

M = TypeVar("M", bound=Message)


class ScriptedWorker:
    def __init__(self, data: Path, identity: str, script: Script, model: str = "tiny") -> None:
        self.identity = identity
        self.script = script
        self.received: list[Message] = []
        self.epochs: list[str] = []
        self.welcomed = asyncio.Event()
        self._model = model
        self._arrived = asyncio.Event()
        self._seqs: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wire: Wire = connect_dealer(self._context, endpoint(data), identity, self._on_frames)
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self) -> None:
        self.send(Join(v=VERSION, build="b", worker=self.identity, model=self._model, nonce="n"))

    async def join_until_welcome(self) -> None:
        self.welcomed.clear()
        async with asyncio.timeout(60):
            while not self.welcomed.is_set():
                self.join()
                try:
                    await asyncio.wait_for(self.welcomed.wait(), 0.2)
                except TimeoutError:
                    continue

    async def die(self) -> None:
        """Closes the connection without a word, as a killed process does."""
        for task in self._tasks:
            task.cancel()
        self._wire.close()
        if not self._context.closed:
            self._context.term()

    # ------------------------------------------------------------------ what scripts say

    def accept(self, submit: Submit, prompt_tokens: int = 7, cached_cold: int = 0) -> None:
        facts = Accepted(epoch=submit.epoch, rid=submit.rid, prompt_tokens=prompt_tokens, max_tokens=100)
        self.send(msgspec.structs.replace(facts, cached_hot=1, cached_cold=cached_cold))

    def row(self, submit: Submit, *texts: str, finish: str | None = None, kind: str = "text", seq: int | None = None) -> None:
        number = self._seqs.get(submit.rid, 0) if seq is None else seq
        self._seqs[submit.rid] = number + 1
        usage = Usage(prompt_tokens=7, completion_tokens=number, cached_hot=1, cached_cold=2) if finish else None
        row = Row(
            rid=submit.rid,
            seq=number,
            tokens=number + 1,
            pieces=[Piece(text=text, kind=kind) for text in texts],  # pyright: ignore[reportArgumentType]
            finish=finish,  # pyright: ignore[reportArgumentType]
            usage=usage,
        )
        self.send(Rows(epoch=submit.epoch, rows=[row]))

    def choice_row(
        self,
        submit: Submit,
        choice: int,
        text: str,
        *,
        finish: FinishReason | None = None,
        logprobs: list[dict[str, object]] | None = None,
    ) -> None:
        """One token of one of several choices; the last one says how many there were."""
        key = f"{submit.rid}/{choice}"
        number = self._seqs[key] = self._seqs.get(key, 0) + 1
        row = Row(
            rid=submit.rid,
            choice=choice,
            seq=number - 1,
            tokens=number,
            pieces=[Piece(text=text)] if text else [],
            logprobs=logprobs,
            finish=finish,
            usage=Usage(prompt_tokens=7, completion_tokens=number, cached_hot=choice and 6) if finish else None,
        )
        self.send(Rows(epoch=submit.epoch, rows=[row]))

    def problem(self, submit: Submit, code: str, message: str = "It did not work.") -> None:
        self.send(Problem(code=code, message=message, rid=submit.rid, epoch=submit.epoch))

    def result(self, submit: Submit, **data: object) -> None:
        self.send(Result(epoch=submit.epoch, rid=submit.rid, data=dict(data)))

    def send(self, message: Message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        self._wire.send(frames)

    async def cancelled(self, submit: Submit) -> None:
        """Until the gateway cancels that request."""
        while not any(cancel.rid == submit.rid for cancel in self.all(Cancel)):
            self._arrived.clear()
            await self._arrived.wait()

    # ------------------------------------------------------------------ what came

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1, timeout_s: float = 60.0) -> list[M]:
        async with asyncio.timeout(timeout_s):
            while len(found := self.all(kind)) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return found

    def _on_frames(self, frames: Frames) -> None:
        message, _ = decode(frames)
        self.received.append(message)
        self._arrived.set()
        if isinstance(message, Welcome):
            self.epochs.append(message.epoch)
            self.welcomed.set()
        elif isinstance(message, Submit):
            task = asyncio.create_task(self.script(self, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


Script = Callable[[ScriptedWorker, Submit], Coroutine[None, None, None]]


def says(*texts: str, finish: str = "stop", gap_s: float = 0.0) -> Script:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit, cached_cold=2)
        for text in texts:
            await asyncio.sleep(gap_s)
            worker.row(submit, text)
        worker.row(submit, finish=finish)

    return script


def refuses(code: str, message: str = "It did not work.") -> Script:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.problem(submit, code, message)

    return script


async def hangs(worker: ScriptedWorker, submit: Submit) -> None:
    """Accepts, says one word, then nothing until cancelled."""
    worker.accept(submit)
    worker.row(submit, "Once")
    await worker.cancelled(submit)
    worker.row(submit, finish="cancelled")
