"""The other end of control.sock for programs that wait: one call, its notes, its reply.

Synchronous and small, because `omlxctl status` is run in loops. Tells that no server runs (by the instance lock) and that one
runs but does not answer (by a deadline for the first message). Must not import anything that loads slowly.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from supervisor.instance import running_pid
from supervisor.protocol import Call, Event, Note, Problem, ProtocolError, Reply, Snapshot, Watch, decode, encode

FIRST_ANSWER_S = 5.0
"""A server that is alive answers a short verb within milliseconds; where the machine swaps or starves, within seconds."""
SHORT_S = 10.0
LOOK_S = 0.25
"""How often a long wait makes sure that the server still lives."""


class NotRunning(Exception):
    """No server holds this run directory."""

    def __init__(self, run: Path) -> None:
        super().__init__(f"omlxd is not running (looked in {run}); start it with: omlxctl serve")
        self.run = run


class NoAnswer(Exception):
    """A server runs but says nothing."""

    def __init__(self, pid: int, waited_s: float) -> None:
        super().__init__(f"omlxd (pid {pid}) does not answer (waited {waited_s:g} s); see: omlxctl logs omlxd, or its log file")
        self.pid = pid


class CallFailed(Exception):
    """The server refused or failed; `code` is one of `protocol.Code` or the verb's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ControlClient:
    """One connection to the server that holds `lock`. Use as a context manager."""

    def __init__(self, lock: Path, control: Path) -> None:
        """Raises `NotRunning` when nothing holds the lock."""
        self._lock = lock
        self._control = control
        self._life = _life_of(control)
        self._waits_long = False
        self.pid = self._server_pid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"c.{os.getpid()}.{secrets.token_hex(4)}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(f"ipc://{control}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def call(
        self,
        verb: str,
        args: Mapping[str, object] | None = None,
        on_note: Callable[[dict[str, object]], None] | None = None,
        timeout_s: float | None = SHORT_S,
    ) -> dict[str, object]:
        """The result of one verb. `timeout_s` None waits as long as the server lives, for loads and followed logs: after a
        silence it is asked whether it does.

        Raises:
            CallFailed: the server said no, or has started again during a long call.
            NoAnswer: it lives but does not speak.
            NotRunning: it ended meanwhile.
        """
        call = Call(id=secrets.token_hex(8), verb=verb, args=dict(args or {}))
        self._socket.send_multipart(encode(call))
        self._waits_long = timeout_s is None
        started = time.monotonic()
        deadline = None if timeout_s is None else started + min(timeout_s, FIRST_ANSWER_S)
        while True:
            frames = self._receive(deadline, started) if deadline is not None else self._receive_late()
            try:
                message, _ = decode(frames)
            except ProtocolError as e:
                raise CallFailed("version_mismatch", f"omlxd (pid {self.pid}) speaks another version: {e}") from e
            if isinstance(message, Problem):
                raise CallFailed(message.code, message.message)
            if isinstance(message, Note) and message.id == call.id:
                deadline = None if timeout_s is None else started + timeout_s
                if on_note:
                    on_note(message.data)
            elif isinstance(message, Reply) and message.id == call.id:
                if message.ok:
                    return message.result
                raise CallFailed(message.code or "internal", message.message or f"{verb} failed")

    def watch(self) -> Iterator[Snapshot | Event]:
        """A snapshot, then every event, for as long as the server lives."""
        self.watch_from(None)
        self._waits_long = True
        started = time.monotonic()
        deadline: float | None = started + FIRST_ANSWER_S
        while True:
            message, _ = decode(self._receive(deadline, started))
            if isinstance(message, Problem):
                raise CallFailed(message.code, message.message)
            if isinstance(message, Snapshot | Event):
                deadline = None
                yield message

    def watch_from(self, since_seq: int | None) -> None:
        """For whoever reads `watch`: the events after that one come next, or a snapshot if they are not all remembered."""
        self._socket.send_multipart(encode(Watch(since_seq=since_seq)))

    def _receive_late(self) -> list[bytes]:
        """However long it takes, as long as the server answers something: a Reply to another id is for nobody."""
        quiet_since = time.monotonic()
        try:
            return self._receive(quiet_since + FIRST_ANSWER_S, quiet_since)
        except NoAnswer:
            self._socket.send_multipart(encode(Call(id=secrets.token_hex(8), verb="ping", args={})))
            return self._receive(quiet_since + FIRST_ANSWER_S + SHORT_S, quiet_since)

    def _receive(self, deadline: float | None, started: float) -> list[bytes]:
        while True:
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if self._socket.poll(max(0, int(left_s * 1000) + 1)):
                return self._socket.recv_multipart()
            pid = self._server_pid()
            if self._waits_long:
                self._same_life()
            if deadline is not None and time.monotonic() >= deadline:
                raise NoAnswer(pid, round(time.monotonic() - started, 1))

    def _same_life(self) -> None:
        """A server that starts again in place keeps lock and pid, and forgets what was asked before: nothing would come."""
        life = _life_of(self._control)
        if None not in (self._life, life) and life != self._life:
            raise CallFailed("restarted", "omlxd was started again meanwhile, and what it was asked before is forgotten")
        self._life = self._life or life

    def _server_pid(self) -> int:
        pid = running_pid(self._lock)
        if pid is None:
            raise NotRunning(self._lock.parent)
        return pid


def _life_of(control: Path) -> tuple[int, float] | None:
    """Each life of a server binds a socket of its own; None between two of them."""
    try:
        at = control.stat()
    except OSError:
        return None
    return at.st_ino, getattr(at, "st_birthtime", at.st_mtime)
