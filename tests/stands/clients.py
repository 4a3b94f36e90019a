"""Clients at work: many at once, and one that notes when each piece of its stream came."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from tests.stands.patience import patient_s
from tests.stands.server import Server

T = TypeVar("T")
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """All at the same time; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass
class Streamed:
    """What a stream brought: `done` only after its last line."""

    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    finish: str | None = None
    error: object = None
    done: bool = False
    tokens: int = 0

    counts: list[int] = field(default_factory=list)
    """Tokens up to each arrival: some tokens show no text of their own."""

    @property
    def gaps_s(self) -> list[float]:
        """Seconds per token from each arrival to the next."""
        pairs = list(zip(self.arrivals, self.counts, strict=True))
        return [(t2 - t1) / max(1, n2 - n1) for (t1, n1), (t2, n2) in itertools.pairwise(pairs)]


def stream(server: Server, model: str, max_tokens: int, into: Streamed | None = None) -> Streamed:
    """Reads to the end; `into` can be looked at meanwhile."""
    got = into or Streamed()
    body = {
        "model": model,
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream_options": USAGE,
    }
    body["messages"] = [{"role": "user", "content": "Tell me a long story."}]
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient_s(60))
    try:
        link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        got.status = answer.status
        for raw in answer:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                got.done = True
            elif line.startswith("data: "):
                _note(json.loads(line.removeprefix("data: ")), got)
    finally:
        link.close()
    return got


def _note(event: dict[str, object], got: Streamed) -> None:
    got.error = got.error or event.get("error")
    if usage := event.get("usage"):
        got.tokens = usage["completion_tokens"]
    for choice in event.get("choices") or ():
        if choice["delta"].get("content"):
            got.arrivals.append(time.monotonic())
            got.counts.append(got.tokens)
        got.finish = got.finish or choice["finish_reason"]
