"""What was measured of both servers, as lines side by side, and the gates that apply to omlxd. Pure."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.decode import Decode
from benchmarks.gates import Gate, number, percent, ratio
from benchmarks.servers import MlxLmServer, Omlxd
from benchmarks.ttft import FirstToken, Ttft

OURS, THEIRS = Omlxd.name, MlxLmServer.name
T = TypeVar("T")
GATED_PROMPT_TOKENS = 2048
"""Shorter prompts are prefilled too fast for shares of that time to mean anything."""
GATED_CPU_MS = 100.0
"""A limit that allows less than this in all cannot be judged: what is done once a second may or may not be in it."""


@dataclass(frozen=True, slots=True)
class Results:
    """By server, in the order of the repeats."""

    ttft: dict[str, list[Ttft]] = field(default_factory=dict[str, list[Ttft]])
    decode: dict[int, dict[str, list[Decode]]] = field(default_factory=dict[int, dict[str, list[Decode]]])
    """By the number of streams first."""

    def add_ttft(self, server: str, measured: Ttft) -> None:
        self.ttft.setdefault(server, []).append(measured)

    def add_decode(self, server: str, measured: Decode) -> None:
        self.decode.setdefault(measured.streams, {}).setdefault(server, []).append(measured)


# The table


def heading(repeats: int) -> str:
    return f"  {f'medians of {repeats}':<44}{OURS:>14}{THEIRS:>18}{'ratio':>10}"


def table(results: Results) -> Iterator[str]:
    for streams, measured in results.decode.items():
        yield _line(f"CPU per token, {_at_once(streams)}", measured, lambda x: x.cpu_ms, "ms")
        yield _line("  from token to token", measured, lambda x: x.wall_ms, "ms")
        if outside := outside_engine_ms(measured[OURS]):
            yield f"  outside {OURS}'s engine: " + ", ".join(f"{role} {number(ms)}" for role, ms in outside.items()) + " ms"
    if not results.ttft:
        return
    for name, moment in _MOMENTS.items():
        yield _line(f"first token, {name}", results.ttft, lambda x, m=moment: m(x).wall_s, "s")
        yield _line("  CPU until then", results.ttft, lambda x, m=moment: m(x).cpu_s, "s")
        yield _line("  prompt tokens from a cache", results.ttft, lambda x, m=moment: m(x).cached_tokens, "")
    yield _line("first token, from kill -9 on", results.ttft, lambda x: x.after_kill_whole_s, "s")


_MOMENTS: dict[str, Callable[[Ttft], FirstToken]] = {
    "cold": lambda x: x.cold,
    "warm": lambda x: x.warm,
    "killed, successor ready": lambda x: x.after_kill,
}


def _line(what: str, measured: dict[str, list[T]], value: Callable[[T], float], unit: str) -> str:
    ours, theirs = ([value(x) for x in measured[name]] for name in (OURS, THEIRS))
    beside = number(ratio(ours, theirs)) if all(theirs) else "-"
    a, b = (f"{number(statistics.median(values))} {unit:<2}" for values in (ours, theirs))
    return f"  {what:<44}{a:>14}{b:>18}{beside:>10}"


def _at_once(streams: int) -> str:
    return f"{streams} stream{'s' * (streams > 1)}"


def outside_engine_ms(measured: list[Decode]) -> dict[str, float]:
    """By role, over all repeats together: one repeat is few seconds, and much is done once a second or less."""
    known = [x for x in measured if x.outside_engine_ms is not None]
    tokens = sum(x.tokens for x in known)
    roles = known[0].outside_engine_ms or () if known else ()
    return {role: sum((x.outside_engine_ms or {})[role] * x.tokens for x in known) / tokens for role in roles}


# The gates


def gates(results: Results) -> Iterator[Gate]:
    if results.ttft and results.ttft[OURS][0].cold.prompt_tokens >= GATED_PROMPT_TOKENS:
        yield from _ttft_gates(results.ttft[OURS])
    ours = {streams: measured[OURS] for streams, measured in results.decode.items()}
    for streams, limit in ((4, 2.0), (8, 3.0)):
        if 1 in ours and streams in ours:
            measured = ratio((x.cpu_ms for x in ours[1]), (x.cpu_ms for x in ours[streams]))
            yield Gate(f"CPU per token, 1 stream / {streams} streams", measured, limit, at_least=True)
    yield from outside_engine_gates(ours)


def outside_engine_gates(ours: dict[int, list[Decode]]) -> Iterator[Gate]:
    """Of omlxd's measurements, by the number of streams."""
    for streams, limit_ms in ((1, 1.0), (8, 0.5)):
        outside = outside_engine_ms(ours.get(streams, []))
        if outside and limit_ms * sum(x.tokens for x in ours[streams]) >= GATED_CPU_MS:
            yield Gate(f"CPU per token outside the engine, {_at_once(streams)}", sum(outside.values()), limit_ms, " ms")


def _ttft_gates(ours: list[Ttft]) -> Iterator[Gate]:
    cold = [x.cold.wall_s for x in ours]
    tokens = ours[0].cold.prompt_tokens
    yield Gate(f"first token after {tokens}: warm from RAM / cold", percent((x.warm.wall_s for x in ours), cold), 10, " %")
    after = percent((x.after_kill.wall_s for x in ours), cold)
    yield Gate(f"first token after {tokens}: killed, successor ready / cold", after, 10, " %")
    yield Gate("  the same with spawn, import, load and warm-up", percent((x.after_kill_whole_s for x in ours), cold), 25, " %")
