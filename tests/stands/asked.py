"""One streamed completion under way: what has come of it so far, and a client that can hang up."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import cast

from tests.stands.patience import patient_s
from tests.stands.server import Server


class Asked:
    """Read by a thread of its own."""

    def __init__(self, server: Server, model: str, prompt: Sequence[int], max_tokens: int, **fields: object) -> None:
        self.text = ""
        self.pieces = 0
        self.finish: str | None = None
        self.error: Mapping[str, object] | None = None
        self.status = 0
        self.ended_at = 0.0
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
        self._link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient_s(60))
        self._link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Asked:
        self._thread.join(patient_s(60))
        assert self.is_over()
        return self

    def hang_up(self) -> None:
        """At once: a close alone waits for the reader to let go of the file, which takes until the server says something."""
        sock = self._link.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the server was first
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._link.close()

    def _read(self) -> None:
        try:
            response = self._link.getresponse()
            self.status = response.status
            if response.status != 200:
                self.error = json.loads(response.read())["error"]
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass  # we have hung up
        self.ended_at = time.monotonic()

    def _take(self, event: Mapping[str, object]) -> None:
        if "error" in event:
            self.error = cast("dict[str, object]", event["error"])
            return
        for choice in event["choices"]:
            self.text += choice["text"]
            self.pieces += bool(choice["text"])
            self.finish = choice["finish_reason"] or self.finish


def until_it_runs(server: Server, asked: Asked, pieces: int = 5) -> None:
    server.wait_for(lambda: asked.pieces >= pieces or asked.is_over(), 30, "it runs")
    assert not asked.is_over(), asked.error
