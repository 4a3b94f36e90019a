"""What serving adds to decoding: CPU per decoded token of omlxd, of mlx_lm.server and of mlx-lm's BatchGenerator alone, as
ratios of one run. All three stay loaded and take turns with the same prompts, greedy; the order of the turns alternates.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Protocol

import aiohttp

from benchmarks.client import Client
from benchmarks.compare import say
from benchmarks.decode import Decode, measure
from benchmarks.gates import Gate, number, ratio
from benchmarks.prompts import Prompts
from benchmarks.report import outside_engine_gates, outside_engine_ms
from benchmarks.servers import Contender, MlxLmServer, Omlxd, both
from tests.stands.models import smollm2_dir
from worker.blas import load_openblas

BARE = "BatchGenerator"
LIMITS = {BARE: 1.15, MlxLmServer.name: 1.1}
"""Of omlxd's CPU per token to theirs."""
GATED_STREAMS = (4, 8)
Measured = dict[int, dict[str, list[Decode]]]
"""By the number of streams, then by name, in the order of the repeats."""


class Subject(Protocol):
    name: str

    async def decode(self, stories: Sequence[str], max_tokens: int) -> Decode: ...


class Served:
    def __init__(self, contender: Contender, session: aiohttp.ClientSession) -> None:
        self.name = contender.name
        self._contender = contender
        self._client = Client(session, contender)

    async def decode(self, stories: Sequence[str], max_tokens: int) -> Decode:
        return await measure(self._contender, self._client, stories, max_tokens)


class Bare:
    name = BARE

    def __init__(self, process: "Popen[str]") -> None:
        self._process = process

    async def decode(self, stories: Sequence[str], max_tokens: int) -> Decode:
        answer = await asyncio.to_thread(self._ask, {"prompts": stories, "max_tokens": max_tokens})
        tokens, streams = answer["tokens"], len(stories)
        wall_ms = 1000 * answer["wall_s"] * streams / tokens
        return Decode(streams, round(tokens), 1000 * answer["cpu_s"] / tokens, None, wall_ms)

    def _ask(self, request: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=96, help="that each stream is asked for")
    parser.add_argument("--streams", type=lambda s: [int(n) for n in s.split(",")], default=[1, 4, 8], help="e.g. 1,4,8")
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    args = parser.parse_args()
    model = (args.model or smollm2_dir()).resolve()
    openblas = load_openblas()
    print(
        f"{model.name}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {openblas or 'MLX’s own matrix library'}",
        flush=True,
    )
    with both(model, openblas) as contenders, bare(model) as process:
        measured = asyncio.run(take_turns(contenders, Bare(process), model, args))
    kept = list(gates(measured))
    print(f"CPU per token, ms, medians of {args.repeats}", *table(measured), "gates", *[g.line() for g in kept], sep="\n")
    return 0 if all(gate.holds for gate in kept) else 1


@contextlib.contextmanager
def bare(model: Path) -> "Iterator[Popen[str]]":
    command = [sys.executable, "-m", "benchmarks.bare_generator", str(model)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), "it did not load the model"
            yield process
        finally:
            process.kill()


async def take_turns(contenders: list[Contender], alone: Bare, model: Path, args: argparse.Namespace) -> Measured:
    measured: Measured = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        subjects: list[Subject] = [alone, *[Served(contender, session) for contender in contenders]]
        prompts = Prompts(model, 1)
        for subject in subjects:  # what a first request costs is not the question
            await subject.decode([prompts.story()], 16)
        for repeat in range(args.repeats):
            for streams in args.streams:
                stories = [prompts.story() for _ in range(streams)]
                for subject in subjects if repeat % 2 == 0 else subjects[::-1]:
                    say(f"{repeat + 1}/{args.repeats} {subject.name}: streams: {streams}")
                    one = await subject.decode(stories, args.decode_tokens)
                    measured.setdefault(streams, {}).setdefault(subject.name, []).append(one)
    return measured


def table(measured: Measured) -> Iterator[str]:
    for streams, by_name in measured.items():
        ours = [x.cpu_ms for x in by_name[Omlxd.name]]
        cells = [f"{name} {number(sorted(x.cpu_ms for x in them)[len(them) // 2])}" for name, them in by_name.items()]
        beside = [f"{ratio(ours, (x.cpu_ms for x in by_name[name])):.2f} × {name}" for name in LIMITS]
        yield f"  {streams} at once: {', '.join(cells)}; {', '.join(beside)}"
        if outside := outside_engine_ms(by_name[Omlxd.name]):
            yield "    outside omlxd's engine: " + ", ".join(f"{role} {number(ms)}" for role, ms in outside.items())


def gates(measured: Measured) -> Iterator[Gate]:
    for streams in GATED_STREAMS:
        for name, limit in LIMITS.items() if streams in measured else ():
            ours, theirs = ([x.cpu_ms for x in measured[streams][who]] for who in (Omlxd.name, name))
            yield Gate(f"CPU per token, {streams} streams / {name}'s", ratio(ours, theirs), limit)
    yield from outside_engine_gates({streams: by_name[Omlxd.name] for streams, by_name in measured.items()})


if __name__ == "__main__":
    sys.exit(main())
