"""A streaming chat client that only measures: when text came, and what the server says it cost.

Knows OpenAI's wire format; must not know which server it talks to.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

TIMEOUT_S = 600.0


class RequestFailed(Exception):
    """The server answered with an error, or its stream ended without usage."""


@dataclass(slots=True)
class Answer:
    """One answer as it comes in; complete once `ask` has returned it. Times are time.perf_counter()."""

    sent_at: float
    first_at: float = 0.0
    """The first token showed itself, as text or as the end of the answer."""
    text_at: list[float] = field(default_factory=list[float])
    is_over: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.text_at, self.text_at[1:], strict=False)]

    @property
    def tokens_per_text(self) -> float:
        """Some tokens show no text of their own, so pieces of text are not a count of tokens."""
        return self.completion_tokens / len(self.text_at)


OnToken = Callable[[Answer], None]


class Target(Protocol):
    model: str

    @property
    def url(self) -> str:
        """May change: a server that is started again has another port."""
        ...


@dataclass(frozen=True, slots=True)
class Client:
    session: aiohttp.ClientSession
    target: Target

    async def ask(self, content: str, max_tokens: int, on_token: OnToken = lambda _: None, **more: object) -> Answer:
        """Raises RequestFailed. `on_token` is called as each piece of text arrives, and at the end; `more` is for the body."""
        body = {
            "model": self.target.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        answer = Answer(time.perf_counter())
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self.session.post(f"{self.target.url}/v1/chat/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                raise RequestFailed(f"{response.status}: {(await response.text())[:300]}")
            async for chunk in _chunks(response):
                _take(answer, chunk, on_token)
        if not answer.completion_tokens:
            raise RequestFailed("the answer was empty or came without usage")
        return answer


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _take(answer: Answer, chunk: dict, on_token: OnToken) -> None:
    if "error" in chunk:
        raise RequestFailed(str(chunk["error"]))
    for choice in chunk.get("choices") or []:
        now = time.perf_counter()
        if has_text := bool(choice["delta"].get("content")):
            answer.text_at.append(now)
        answer.is_over = bool(choice.get("finish_reason"))
        if has_text or answer.is_over:
            answer.first_at = answer.first_at or now
            on_token(answer)
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
