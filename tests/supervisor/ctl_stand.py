"""A supervisor that follows a script, a gateway that does, and omlxctl run in this process as from a shell."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import pytest
import zmq

from supervisor import ctl
from supervisor.instance import InstanceLock
from supervisor.ipc import endpoint
from supervisor.protocol import Call, ChildStatus, Message, Note, Reply, ServerStatus, SlotStatus, decode, encode, plain

Script = Callable[[dict[str, object]], Iterator["Step"]]
Step = dict[str, object] | tuple[str, str] | None
"""A dict is a note, the last one the result; a tuple is (code, message); None leaves the call unanswered."""

SLOT = SlotStatus(
    id="tiny",
    path="/m/tiny",
    state="ready",
    context=512,
    weights_bytes=3 << 20,
    pid=41,
    charged_bytes=2 << 30,
    measured_bytes=3 << 29,
)
STATUS = ServerStatus(
    version="0.1.0",
    build="0.1.0",
    pid=7,
    started=1.0,
    host="127.0.0.1",
    port=8123,
    home="/h",
    budget_bytes=16 << 30,
    charged_bytes=2 << 30,
    models=[SLOT, SlotStatus(id="other", path="/m/other", state="idle", context=99, weights_bytes=5)],
    children=[ChildStatus(name="gateway", state="ready", pid=42, restarts=3)],
    warnings=["the fan is loud"],
)


class ScriptedSupervisor:
    """Holds the instance lock and answers calls from control.sock as told. `calls` is what it was asked."""

    def __init__(self, home: Path) -> None:
        run = home / "run"
        run.mkdir(parents=True, exist_ok=True)
        self.scripts: dict[str, Script] = {"status": lambda _: iter([plain_dict(STATUS)])}
        self.calls: list[tuple[str, dict[str, object]]] = []
        self._lock = InstanceLock(run / "omlxd.lock")
        self._control = run / "control.sock"
        self._changing = threading.Lock()  # who starts it again is another thread than who ends it
        self._begin()

    def _begin(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint(self._control))
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def start_again(self) -> None:
        """In place: the lock is held all the time."""
        with self._changing:
            self._end()
            self._begin()

    def _end(self) -> None:
        """With its context: only then is it sure that the old socket does not take away the file of the next one."""
        self._leave.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def answers(self, verb: str, *steps: Step) -> None:
        self.scripts[verb] = lambda _: iter(steps)

    def answers_and_ends(self, verb: str, *steps: Step, after_s: float) -> None:
        """It is gone so long after it was asked that."""

        def script(_: dict[str, object]) -> Iterator[Step]:
            threading.Timer(after_s, self.release).start()
            return iter(steps)

        self.scripts[verb] = script

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> ScriptedSupervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None) -> None:
        with self._changing:
            self._end()

    def _serve(self) -> None:
        while not self._leave.is_set():
            if self._socket.poll(20):
                identity, *frames = self._socket.recv_multipart()
                call, _ = decode(frames)
                assert isinstance(call, Call) and identity.startswith(b"c.")
                self.calls.append((call.verb, call.args))
                for message in self._messages(call):
                    self._socket.send_multipart([identity, *encode(message)])

    def _messages(self, call: Call) -> Iterator[Message]:
        steps = list(self.scripts[call.verb](call.args))
        for step in steps[:-1]:
            assert isinstance(step, dict)
            yield Note(id=call.id, data=step)
        match steps[-1]:
            case dict() as result:
                yield Reply(id=call.id, ok=True, result=result)
            case (code, message):
                yield Reply(id=call.id, ok=False, code=code, message=message)
            case None:
                return


def plain_dict(value: object) -> dict[str, object]:
    result = plain(value)
    assert isinstance(result, dict)
    return result


@dataclass
class Ran:
    status: int
    out: str
    err: str


@dataclass
class Shell:
    """Runs omlxctl the way a shell does, without the 0.2 s of a process."""

    home: Path
    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def __call__(self, *words: str, as_omlxd: bool = False) -> Ran:
        self.captured.readouterr()
        self.patch.setattr(sys, "argv", ["omlxd" if as_omlxd else "omlxctl", *words])
        with pytest.raises(SystemExit) as end:
            (ctl.serve_main if as_omlxd else ctl.main)()
        out, err = self.captured.readouterr()
        return Ran(int(end.value.code or 0), out, err)


@dataclass
class ScriptedGateway:
    """An HTTP server with the two routes that omlxctl uses. `seen` is (path, key, body) of every request."""

    events: Sequence[str] = ()
    status: int = 200
    models: Sequence[str] = ("tiny",)
    seen: list[tuple[str, str | None, dict[str, object]]] = field(default_factory=list)
    cut: bool = False

    def __enter__(self) -> ScriptedGateway:
        stand = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer("application/json", json.dumps({"data": [{"id": name} for name in stand.models]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand.seen.append((self.path, self.headers["Authorization"], body))
                lines = "".join(f"data: {event}\n\n" for event in stand.events)
                self._answer("text/event-stream" if stand.status == 200 else "application/json", lines.encode())

            def _answer(self, kind: str, data: bytes) -> None:
                if stand.status != 200:
                    data = stand.events[0].encode()
                self.send_response(stand.status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data) + (10 if stand.cut else 0)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})
