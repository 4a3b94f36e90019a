"""The two servers that are compared, with one face: their processes, and how the one with the model dies and comes back.

Both serve the same model directory and, on Linux, compute with the same OpenBLAS: omlxd loads it by itself, mlx_lm.server
gets it preloaded (without it, it would be some thirty times slower).
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

import psutil

from tests.stands.server import Server, running

LOAD_S = 120.0
SETTLED_S = 0.5


class Contender(Protocol):
    name: str
    model: str
    """As requests name it."""
    engine_role: str
    outlives_its_model: bool
    """The server still answers after `kill_model`, and brings the model back at the next request."""

    @property
    def url(self) -> str: ...

    def pids(self) -> Mapping[str, int]:
        """By role; `engine_role` is the process that holds the model."""
        ...

    def settle(self) -> None:
        """Returns when what is written behind the answers is written."""
        ...

    def kill_model(self) -> None:
        """SIGKILL to the process that holds the model; returns when it is gone."""
        ...

    def revive(self) -> None:
        """After a kill: returns when HTTP is answered and, if there is a way to ask for that, the model is loaded."""
        ...


class Omlxd:
    name = "omlxd"
    model = "bench"
    engine_role = "worker"
    outlives_its_model = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self.load()

    @property
    def url(self) -> str:
        return self._server.url

    def pids(self) -> Mapping[str, int]:
        status = self._server.status()
        children = {child["name"]: child["pid"] for child in status["children"]}
        return {"supervisor": status["pid"], **children, self.engine_role: self._server.pid_of(self.model)}

    def load(self) -> None:
        self._server.ctl("load", self.model, timeout_s=LOAD_S)

    def settle(self) -> None:
        cache, seen, since = self._server.home / "cache", -1, time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            now = sum(1 for _ in cache.rglob("*.safetensors"))
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.05)

    def kill_model(self) -> None:
        worker = psutil.Process(self._server.pid_of(self.model))
        worker.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(10)

    def revive(self) -> None:
        self._server.wait_for(lambda: self._server.model(self.model)["state"] != "ready", 10, "the death is noticed")
        self.load()
        # Each kill counts as a crash, and a model that crashes three times in five minutes is given up.
        self._server.ctl("reset", self.model)


class MlxLmServer:
    name = "mlx_lm.server"
    engine_role = "server"
    outlives_its_model = False

    def __init__(self, model: Path, openblas: str | None, output: IO[bytes]) -> None:
        self.model = str(model)
        self._environment = os.environ | ({"LD_PRELOAD": openblas} if openblas else {})
        self._output = output
        self.revive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def pids(self) -> Mapping[str, int]:
        return {self.engine_role: self._process.pid}

    def settle(self) -> None:
        """It writes nothing."""

    def kill_model(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def revive(self) -> None:
        self._port = _free_port()
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", self.model, "--port", str(self._port)]
        command += ["--host", "127.0.0.1", "--log-level", "WARNING"]
        self._process = subprocess.Popen(command, env=self._environment, stdout=self._output, stderr=self._output)
        deadline = time.monotonic() + LOAD_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                raise RuntimeError(f"mlx_lm.server did not start:\n{self._output.read().decode(errors='replace')}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return response.status == 200
        except OSError:
            return False


@contextlib.contextmanager
def both(model: Path, openblas: str | None) -> Iterator[list[Contender]]:
    """Both running, gone at the end whatever happens."""
    with tempfile.TemporaryFile() as output, running({Omlxd.model: model}) as server:
        theirs = MlxLmServer(model, openblas, output)
        try:
            yield [Omlxd(server), theirs]
        finally:
            theirs.kill_model()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
