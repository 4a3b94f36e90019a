"""omlxd beside mlx_lm.server on one model: CPU per decoded token, and first tokens cold, warm and after a kill, as ratios.

Both servers stay up and are measured in turns, repeat by repeat, so that whatever else the machine does hits both alike.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import aiohttp

from benchmarks import decode, ttft
from benchmarks.client import Client
from benchmarks.prompts import Prompts
from benchmarks.report import Results, gates, heading, table
from benchmarks.servers import Contender, both
from tests.stands.models import smollm2_dir
from worker.blas import load_openblas

SCENARIOS = ("decode", "ttft")


def main() -> int:
    args = arguments()
    openblas = load_openblas()
    builds = ", ".join(f"{name} {version(name)}" for name in ("omlxd", "mlx-lm", "mlx"))
    print(f"{args.model.name}; {builds}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"matrix library of both servers: {openblas or 'what MLX comes with'}", flush=True)
    with both(args.model, openblas) as contenders:
        results = asyncio.run(measure(contenders, args))
    if args.json:
        args.json.write_text(json.dumps(dataclasses.asdict(results), indent=1))
    print("", heading(args.repeats), *table(results), "", sep="\n")
    kept = list(gates(results))
    print("gates" if kept else "too little was measured for any gate", *[gate.line() for gate in kept], sep="\n")
    return 0 if all(gate.holds for gate in kept) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2048 + 17, help="of the prompt whose first token is timed")
    parser.add_argument("--decode-tokens", type=int, default=64, help="that each stream is asked for")
    parser.add_argument(
        "--streams", type=lambda s: [int(n) for n in s.split(",")], default=[1, 4, 8], help="at once, e.g. 1,4,8"
    )
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' words")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    args = parser.parse_args()
    args.model = (args.model or smollm2_dir()).resolve()
    args.scenario = args.scenario or list(SCENARIOS)
    return args


async def measure(contenders: list[Contender], args: argparse.Namespace) -> Results:
    results = Results()
    # A connection per request: how a server treats one that is kept open is not the question here.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        subjects = [await Subject.of(contender, session, args) for contender in contenders]
        for repeat in range(args.repeats):
            turns = subjects if repeat % 2 == 0 else subjects[::-1]
            at = f"{repeat + 1}/{args.repeats}"
            for streams in args.streams if "decode" in args.scenario else ():
                for subject in turns:
                    say(f"{at} {subject.name}: decode, streams: {streams}")
                    results.add_decode(subject.name, await subject.decode(streams, args.decode_tokens))
            for subject in turns if "ttft" in args.scenario else ():
                say(f"{at} {subject.name}: first token after {args.prompt_tokens}, cold, warm, killed")
                results.add_ttft(subject.name, await subject.ttft(args.prompt_tokens))
    return results


class Subject:
    """One server under measurement, with prompts that are the same for each of them."""

    def __init__(self, contender: Contender, client: Client, prompts: Prompts) -> None:
        self.name = contender.name
        self._contender = contender
        self._client = client
        self._prompts = prompts

    @classmethod
    async def of(cls, contender: Contender, session: aiohttp.ClientSession, args: argparse.Namespace) -> "Subject":
        client, prompts = Client(session, contender), Prompts(args.model, args.seed)
        content = "Write a story about a house."
        answer = await client.ask(content, 8)
        prompts.learn_template(content, answer.prompt_tokens)
        return cls(contender, client, prompts)

    async def decode(self, streams: int, max_tokens: int) -> decode.Decode:
        stories = [self._prompts.story() for _ in range(streams)]
        return await decode.measure(self._contender, self._client, stories, max_tokens)

    async def ttft(self, prompt_tokens: int) -> ttft.Ttft:
        return await ttft.measure(self._contender, self._client, self._prompts, prompt_tokens)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
