"""CPU per decoded token with several streams at once, while all of them decode: prefills and stragglers are left out."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import cpu
from benchmarks.client import Answer, Client
from benchmarks.servers import Contender


@dataclass(frozen=True, slots=True)
class Decode:
    streams: int
    tokens: int
    cpu_ms: float
    """Of all the server's processes, per token; so is the next."""
    outside_engine_ms: Mapping[str, float] | None
    """By role; None where threads cannot be told apart."""
    wall_ms: float
    """Per token of one stream: the median gap."""


class Window:
    """From the first moment at which every stream has begun to the first at which one is over."""

    def __init__(self, pids: Mapping[str, int], streams: int) -> None:
        self._pids = pids
        self._streams = streams
        self._answers: dict[int, Answer] = {}
        self._begun: tuple[cpu.Reading, list[int]] | None = None
        self._ended: tuple[cpu.Reading, list[int]] | None = None

    def on_token(self, answer: Answer) -> None:
        self._answers[id(answer)] = answer
        if self._ended is not None:
            return
        if answer.is_over:
            self._ended = self._now()
        elif self._begun is None and len(self._answers) == self._streams:
            self._begun = self._now()

    def outcome(self, engine_role: str) -> Decode:
        if self._begun is None or self._ended is None:
            raise RuntimeError("the streams never decoded together: answers are too short for this many")
        (before, then), (after, now) = self._begun, self._ended
        answers = list(self._answers.values())
        tokens = sum((b - a) * x.tokens_per_text for x, a, b in zip(answers, then, now, strict=True))
        if tokens < self._streams:
            raise RuntimeError("the streams hardly decoded together: answers are too short for this many")
        used = cpu.spent(before, after, engine_role)
        outside = used.outside_engine_s
        gaps = [gap for x, a, b in zip(answers, then, now, strict=True) for gap in x.gaps_s[a - 1 : b - 1]]
        return Decode(
            streams=self._streams,
            tokens=round(tokens),
            cpu_ms=1000 * used.total_s / tokens,
            outside_engine_ms=outside and {role: 1000 * seconds / tokens for role, seconds in outside.items()},
            wall_ms=1000 * statistics.median(gaps),
        )

    def _now(self) -> tuple[cpu.Reading, list[int]]:
        return cpu.read(self._pids), [len(answer.text_at) for answer in self._answers.values()]


async def measure(contender: Contender, client: Client, contents: Sequence[str], max_tokens: int) -> Decode:
    """One stream for each of the contents."""
    window = Window(contender.pids(), len(contents))
    await asyncio.gather(*[client.ask(content, max_tokens, window.on_token) for content in contents])
    return window.outcome(contender.engine_role)
