"""Clients that ask one thing after the other while processes die around them, and say of each answer how it really ended.

They read plain sockets to the end: only so an answer that was cut can be told from one that ended.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BOUND_S = 90.0
"""No request may take longer, however many processes die meanwhile."""
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
How = Literal["whole", "failed", "aborted", "left"]
ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Ask:
    dialect: Literal["chat", "completions"]
    model: str
    prompt: str
    max_tokens: int
    streams: bool = False
    leaves_after_bytes: int | None = None

    def body(self) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "stream": self.streams,
        }
        fields |= {"prompt": self.prompt} if self.dialect == "completions" else {"messages": [user(self.prompt)]}
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Outcome:
    ask: Ask
    how: How
    begun: float
    ended: float
    text: str = ""
    code: str = ""


class NotHowToEnd(AssertionError):
    """The answer ended as none may."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def carry_out(port: int, ask: Ask) -> Outcome:
    """Raises NotHowToEnd, or TimeoutError for an answer that does not come."""
    begun = time.monotonic()
    try:
        raw = _read(port, ask, begun + BOUND_S)
    except (ConnectionError, BrokenPipeError):
        return Outcome(ask, "aborted", begun, time.monotonic())
    ended = time.monotonic()
    if raw is None:
        return Outcome(ask, "left", begun, ended)
    status, body = _whole_body(raw)
    if body is None:
        return Outcome(ask, "aborted", begun, ended)
    if status != 200:
        return Outcome(ask, "failed", begun, ended, code=_error(json.loads(body)))
    if not ask.streams:
        return Outcome(ask, "whole", begun, ended, _text(json.loads(body), ask))
    *events, last = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    if last == "[DONE]":
        return Outcome(ask, "whole", begun, ended, _streamed([json.loads(event) for event in events], ask))
    if "error" not in json.loads(last):
        raise NotHowToEnd(f"a clean end without the answer's: {ask}\n{body[-500:]!r}")
    return Outcome(ask, "failed", begun, ended, code=_error(json.loads(last)))


def _read(port: int, ask: Ask, deadline: float) -> bytes | None:
    """Everything up to the end of the connection; None if the client left before."""
    body, raw = ask.body(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as link:
        head = (
            f"POST {PATHS[ask.dialect]} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        link.sendall(head.encode() + body)
        while True:
            link.settimeout(max(0.01, deadline - time.monotonic()))
            data = link.recv(65536)
            raw += data
            if not data:
                return raw
            if ask.leaves_after_bytes is not None and len(raw) > ask.leaves_after_bytes:
                return None


def _whole_body(raw: bytes) -> tuple[int, bytes | None]:
    """Status and body; None for a body that was cut."""
    head, cut, body = raw.partition(b"\r\n\r\n")
    if not cut:
        return 0, None
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    status = int(first.split()[1])
    if "content-length" in headers:
        return status, body if len(body) == int(headers["content-length"]) else None
    return status, _joined_chunks(body)


def _joined_chunks(body: bytes) -> bytes | None:
    joined = b""
    while True:
        size, found, body = body.partition(b"\r\n")
        if not found:
            return None
        length = int(size, 16)
        if length == 0:
            return joined
        if len(body) < length + 2:
            return None
        joined, body = joined + body[:length], body[length + 2 :]


def _error(body: Mapping[str, object]) -> str:
    """Its code, if it is an error in the dialect."""
    error = body.get("error")
    if (
        not isinstance(error, dict)
        or not set(error) >= ERROR_KEYS
        or not (error["message"] and error["type"] and error["code"])
    ):
        raise NotHowToEnd(f"no error of the dialect: {body}")
    return str(error["code"])


def _text(body: dict[str, object], ask: Ask) -> str:
    choice = body["choices"][0]
    if choice["finish_reason"] != "length":
        raise NotHowToEnd(f"finished by {choice['finish_reason']}: {ask}")
    return choice["text"] if ask.dialect == "completions" else choice["message"]["content"]


def _streamed(events: list[dict[str, object]], ask: Ask) -> str:
    choices = [choice for event in events for choice in event.get("choices") or ()]
    if [c["finish_reason"] for c in choices if c["finish_reason"]] != ["length"]:
        raise NotHowToEnd(f"not finished once by its length: {ask}")
    return "".join((c["text"] if ask.dialect == "completions" else c["delta"].get("content")) or "" for c in choices)
