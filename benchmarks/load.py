"""omlxd under load, as ratios of one run: what running streams and a long prompt cost each other, what unlike lengths cost
in KV, and what a prompt costs that nobody waits for any more.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from benchmarks.client import Answer, Client
from benchmarks.gates import Gate, ratio
from benchmarks.prompts import Prompts
from benchmarks.servers import Omlxd
from supervisor.model_files import read_model
from tests.stands.models import smollm2_dir
from tests.stands.server import Server, running

STREAMS = 3
SHORT_ROWS = 7
RESET_AFTER_S = 1.5
BEAT_S = 2.5
"""A heartbeat that was sent when all were there has arrived by then."""
CHUNK_TOKENS = 256
"""What one round prefills on a CPU while nothing decodes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=1504)
    parser.add_argument("--long-tokens", type=int, default=4000, help="of one row beside short ones; 0: not measured")
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    args = parser.parse_args()
    model = (args.model or smollm2_dir()).resolve()
    print(f"{model.name}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with running({Omlxd.model: model}) as server:
        gates = asyncio.run(measure(server, model, args))
    print("gates", *[gate.line() for gate in gates], sep="\n")
    return 0 if all(gate.holds for gate in gates) else 1


async def measure(server: Server, model: Path, args: argparse.Namespace) -> list[Gate]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        client, prompts = Client(session, Omlxd(server)), Prompts(model, 1)
        first = await client.ask("Write a story about a house.", 8)
        prompts.learn_template("Write a story about a house.", first.prompt_tokens)
        alone_s, beside_s, gaps_s, delays_s, resumed = [], [], [], [], []
        for _ in range(args.repeats):
            alone_s.append((await client.ask(prompts.fresh(args.prompt_tokens), 1)).first_token_s)
            gap_s, first_s = await beside_streams(client, prompts, args.prompt_tokens)
            gaps_s.append(gap_s)
            beside_s.append(first_s)
            delay_s, cached = await after_a_reset(client, prompts, args.prompt_tokens)
            delays_s.append(delay_s)
            resumed.append(cached)
            say = f"alone {alone_s[-1]:.2f} s, beside {STREAMS} streams {first_s:.2f} s, worst gap {gap_s:.2f} s; "
            print(f"  first token {say}after a reset +{delay_s:.2f} s, {cached} tokens kept", flush=True)
        tokens = args.prompt_tokens
        chunks_s = [one * CHUNK_TOKENS / tokens for one in alone_s]
        gates = [
            Gate(f"worst gap of {STREAMS} streams / first token of {tokens}", 100 * ratio(gaps_s, beside_s), 15, " %"),
            Gate(f"first token of {tokens} beside {STREAMS} streams / alone", ratio(beside_s, alone_s), 1.45),
            Gate("delay after a reset / one chunk", ratio(delays_s, chunks_s), 1.0),
            Gate("tokens of the abandoned prompt kept", statistics.median(resumed), 1, at_least=True),
        ]
        if args.long_tokens:
            padded = await unlike_rows(server, model, client, prompts, args.long_tokens)
            what = f"KV of {args.long_tokens} + {SHORT_ROWS} × some 70 tokens / their sum"
            gates.append(Gate(what, padded, 1.6))
        return gates


async def beside_streams(client: Client, prompts: Prompts, tokens: int) -> tuple[float, float]:
    """The worst gap of streams while a prompt is prefilled, and its time to the first token."""
    seen: dict[int, Answer] = {}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(STREAMS):
            await stack.enter_async_context(stream(client, prompts.story(), seen))
        await until(lambda: len(seen) == STREAMS and all(len(answer.text_at) > 3 for answer in seen.values()))
        long = await client.ask(prompts.fresh(tokens), 1)
        ends = [long.sent_at, long.first_at]
        within = [[*ends, *[at for at in answer.text_at if ends[0] < at < ends[1]]] for answer in seen.values()]
        gaps = [b - a for times in map(sorted, within) for a, b in itertools.pairwise(times)]
    return max(gaps), long.first_token_s


@contextlib.asynccontextmanager
async def stream(client: Client, content: str, seen: dict[int, Answer]) -> AsyncIterator[None]:
    """A client that reads a long answer, which does not end by itself, and leaves at the end."""
    ask = client.ask(content, 2000, lambda answer: seen.setdefault(id(answer), answer), ignore_eos=True)
    task = asyncio.create_task(ask)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def after_a_reset(client: Client, prompts: Prompts, tokens: int) -> tuple[float, int]:
    """By how much a one-token request is late that comes right after a client left a long prefill; tokens of that one kept."""
    quiet = await client.ask(prompts.story(), 1)
    abandoned = prompts.fresh(tokens)
    task = asyncio.create_task(client.ask(abandoned, 1))
    await asyncio.sleep(RESET_AFTER_S)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    after = await client.ask(prompts.story(), 1)
    again = await client.ask(abandoned, 1)
    return after.first_token_s - quiet.first_token_s, again.cached_tokens


async def unlike_rows(server: Server, model: Path, client: Client, prompts: Prompts, tokens: int) -> float:
    """Bytes of KV that one long row and seven short ones hold, to the bytes of their tokens, while all decode."""
    seen: dict[int, Answer] = {}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(stream(client, prompts.fresh(tokens), seen))
        for _ in range(SHORT_ROWS):
            await stack.enter_async_context(stream(client, prompts.story(), seen))
        await until(lambda: len(seen) == 1 + SHORT_ROWS)
        await asyncio.sleep(BEAT_S)
        beat = (await asyncio.to_thread(server.model, Omlxd.model))["beat"]
    assert len(beat["lease_tokens"]) == 1 + SHORT_ROWS, "a row is over: its KV would be missing on one side"
    return beat["kv_bytes"] / (sum(beat["lease_tokens"].values()) * read_model(model).kv_bytes_per_token)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
