"""One streaming chat over a plain socket, read event by event: shows how a connection really ended."""

from __future__ import annotations

import json
import socket

from tests.stands.patience import patient_s
from tests.stands.server import Server


class Stream:
    def __init__(self, server: Server, model: str, content: str, **fields: object) -> None:
        body = json.dumps(
            {"model": model, "messages": [{"role": "user", "content": content}], "stream": True, "temperature": 0, **fields}
        ).encode()
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=patient_s(60))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self.socket.sendall(head + body)
        self.file = self.socket.makefile("rb")
        self.text = ""

    def event(self) -> str | None:
        """The next data line, or None at the end of the connection."""
        for line in self.file:
            if line.startswith(b"data: "):
                event = line[6:].decode().strip()
                self.text += _content(event)
                return event
            if line == b"0\r\n":
                return None
        return None

    def until_accepted(self) -> None:
        """Up to the first event, which has no content: the status has been sent."""
        event = self.event()
        assert event is not None and not _content(event)

    def until_content(self) -> None:
        while self.event() is not None:
            if self.text:
                return
        raise AssertionError("the stream ended before any content")

    def rest(self) -> list[str]:
        events: list[str] = []
        try:
            while (event := self.event()) is not None:
                events.append(event)
        except OSError:
            events.append("RESET")
        return events

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def _content(event: str) -> str:
    choices = json.loads(event).get("choices") if event.startswith("{") else None
    return (choices[0]["delta"].get("content") or "") if choices else ""
