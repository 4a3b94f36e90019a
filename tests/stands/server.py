"""A whole omlxd in a private home, started and driven as a user would: `omlxctl serve`, HTTP, signals.

Nothing is injected: what a test wants changed it says with settings. The home is short-lived and has a short path, since the
paths of ipc sockets are limited.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from supervisor.client import ControlClient, NoAnswer, NotRunning
from tests.stands.patience import patient_s

START_S = 60.0
"""It takes one second or two on cores that are free."""
ANSWER_S = 15.0
OMLXCTL = [str(Path(sys.executable).parent / "omlxctl")]


class Server:
    """One running `omlxctl serve` and its home."""

    def __init__(self, home: Path, settings: Mapping[str, object] | None = None, args: tuple[str, ...] = ()) -> None:
        self.home = home
        self.args = args
        self.output = home / "serve.out"
        if settings is not None:
            (home / "settings.json").write_text(json.dumps(settings))
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.variables: dict[str, str] = {}
        """What its environment holds besides."""

    # Life

    def start(self) -> None:
        with self.output.open("ab") as out:
            self.process = subprocess.Popen([*OMLXCTL, "serve", *self.args], env=self.env(), stdout=out, stderr=out)
        self.wait_for(lambda: self.process.poll() is not None or self._answers(), START_S, "the server answers")
        if self.process.poll() is not None:
            raise AssertionError(f"omlxctl serve ended with {self.process.returncode}:\n{self.said()}")

    def stop(self) -> int:
        """SIGTERM, as a service manager would; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=patient_s(30))

    def kill(self) -> None:
        """The supervisor dies as if the machine had shot it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=patient_s(10))

    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
        return {**kept, "OMLX_HOME": str(self.home), "OMLX_PORT": "0", **self.variables}

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    # Looking at it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ctl(self, *args: str, timeout_s: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*OMLXCTL, *args], env=self.env(), capture_output=True, text=True, timeout=patient_s(timeout_s))
        if check and done.returncode != 0:
            raise AssertionError(f"omlxctl {' '.join(args)} ended with {done.returncode}: {done.stderr}\n{self.said()}")
        return done

    def status(self) -> dict[str, Any]:
        """What `omlxctl status --json` prints, without the 0.2 s of its process: it is asked for in loops.

        Raises NotRunning, or NoAnswer where the server has said nothing for long.
        """
        began_at = time.monotonic()
        while True:
            with ControlClient(self.home / "run" / "omlxd.lock", self.home / "run" / "control.sock") as client:
                try:
                    return client.call("status")
                except NoAnswer:  # after 5 s, which a busy machine may take
                    if time.monotonic() - began_at > patient_s(ANSWER_S):
                        raise

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in self.status()["models"] if m["id"] == name)

    def pid_of(self, name: str) -> int:
        """Pid of the worker of a model, or of an attendant."""
        status = self.status()
        entry = next(e for e in [*status["models"], *status["children"]] if e.get("id", e.get("name")) == name)
        assert entry["pid"], f"{name} has no process: {entry}"
        return entry["pid"]

    def family(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    # Using it

    def post(self, path: str, body: object, timeout_s: float | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        return _send(request, patient_s(60) if timeout_s is None else timeout_s)

    def get(self, path: str, timeout_s: float = 25) -> Answer:
        return _send(urllib.request.Request(self.url + path), timeout_s)

    def chat(self, model: str, content: str, *, system: str | None = None, **fields: object) -> Answer:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        return self.post("/v1/chat/completions", {"model": model, "messages": messages, "temperature": 0, **fields})

    def wait_for(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        """`within_s` is generous on cores that are free; on busy ones it is waited for as long as it takes there."""
        began_at = time.monotonic()
        while not condition():
            if time.monotonic() - began_at > patient_s(within_s):
                raise AssertionError(f"not within {within_s} s: {what}\n{self.said()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            status = self.status()
        except (NotRunning, NoAnswer):
            return False
        self.port = status["port"]
        return all(child["state"] == "running" for child in status["children"]) and self._http_up()

    def _http_up(self) -> bool:
        try:
            return self.get("/health", timeout_s=2).status == 200
        except OSError:
            return False


class Answer:
    """Status, headers and body of one response."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        choice = self.json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def cached_tokens(self) -> int:
        return self.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:500]!r}"


def _send(request: urllib.request.Request, timeout_s: float) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as e:
        return Answer(e.code, dict(e.headers), e.read())


@contextmanager
def home_with(models: Mapping[str, Path]) -> Iterator[Path]:
    """A fresh home with links to `models`."""
    home = Path(tempfile.mkdtemp(prefix="omx", dir="/tmp"))
    try:
        (home / "models").mkdir()
        for name, path in models.items():
            link = home / "models" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def running(
    models: Mapping[str, Path], settings: Mapping[str, object] | None = None, args: tuple[str, ...] = ()
) -> Iterator[Server]:
    """A server with these models that is stopped at the end, whatever happens."""
    with home_with(models) as home:
        server = Server(home, settings, args)
        try:
            server.start()
            yield server
        finally:
            if server.process is not None and server.process.poll() is None:
                try:
                    server.stop()
                except subprocess.TimeoutExpired:
                    server.kill()
