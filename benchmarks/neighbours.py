"""Two models at work on one machine, as ratios of one run: what a stream of one and a long prompt of the other cost each other,
and what two long prompts do.
"""

import argparse
import asyncio
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.client import Answer, Client
from benchmarks.gates import Gate, percent, ratio
from benchmarks.load import stream, until
from benchmarks.prompts import Prompts
from tests.stands.models import smollm2_dir
from tests.stands.server import Server, running

STREAMING, PROMPTED = "a", "b"


@dataclass(frozen=True, slots=True)
class Model:
    """`benchmarks.client.Target`"""

    model: str
    url: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=1504)
    parser.add_argument("--model", type=Path, help="an MLX model directory, loaded twice; default: SmolLM2, imported once")
    args = parser.parse_args()
    model = (args.model or smollm2_dir()).resolve()
    print(f"two of {model.name}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with running({STREAMING: model, PROMPTED: model}) as server:
        for name in (STREAMING, PROMPTED):
            server.ctl("load", name)
        gates = asyncio.run(measure(server, Prompts(model, 1), args.prompt_tokens, args.repeats))
    print("gates", *[gate.line() for gate in gates], sep="\n")
    return 0 if all(gate.holds for gate in gates) else 1


async def measure(server: Server, prompts: Prompts, tokens: int, repeats: int) -> list[Gate]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        streaming, prompted = (Client(session, Model(name, server.url)) for name in (STREAMING, PROMPTED))
        first = await prompted.ask("Write a story about a house.", 8)
        prompts.learn_template("Write a story about a house.", first.prompt_tokens)
        alone_s, beside_s, gaps_s, both_s = [], [], [], []
        for _ in range(repeats):
            alone_s.append((await prompted.ask(prompts.fresh(tokens), 1)).first_token_s)
            gap_s, first_s = await beside_a_stream(streaming, prompted, prompts, tokens)
            gaps_s.append(gap_s)
            beside_s.append(first_s)
            both = await asyncio.gather(*[client.ask(prompts.fresh(tokens), 1) for client in (streaming, prompted)])
            both_s.append(max(answer.first_token_s for answer in both))
            beside = f"beside a stream {first_s:.2f} s with a gap of {gap_s:.2f} s"
            print(f"  alone {alone_s[-1]:.2f} s, {beside}, two at once {both_s[-1]:.2f} s", flush=True)
        return [
            Gate(f"worst gap of a stream / a neighbour's first token of {tokens}", percent(gaps_s, beside_s), 15, " %"),
            Gate("that first token / alone", ratio(beside_s, alone_s), 2.5),
            Gate("the later of two prompts at once / alone", ratio(both_s, alone_s), 2.5),
        ]


async def beside_a_stream(streaming: Client, prompted: Client, prompts: Prompts, tokens: int) -> tuple[float, float]:
    """The worst gap of one model's stream while the other's prompt is prefilled, and that one's time to the first token."""
    seen: dict[int, Answer] = {}
    async with stream(streaming, prompts.story(), seen):
        await until(lambda: all(len(answer.text_at) > 3 for answer in seen.values()) and bool(seen))
        long = await prompted.ask(prompts.fresh(tokens), 1)
        (answer,) = seen.values()
        within = [long.sent_at, *[at for at in answer.text_at if long.sent_at < at < long.first_at], long.first_at]
    return max(b - a for a, b in itertools.pairwise(within)), long.first_token_s


if __name__ == "__main__":
    sys.exit(main())
