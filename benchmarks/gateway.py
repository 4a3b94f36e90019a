"""What the gateway costs per token and how evenly it serves: its real process between many streams and a worker that only
emits tokens, at a given pace, from a process of its own. No model is involved.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from benchmarks import cpu
from benchmarks.client import Answer, Client
from benchmarks.gates import Gate, number
from tests.stands.scripted_supervisor import WORKER, ScriptedSupervisor, slot

COSTED_STREAMS, EVEN_STREAMS = 64, 200
TOKENS_PER_S = 25.0
"""Of one stream: 200 of them are 5000 tokens a second, as many as this client can read beside the gateway on two cores."""
ROLE = "gateway"


@dataclass(frozen=True, slots=True)
class Served:
    cpu_us: float
    """Of the gateway's process, per token."""
    slowest: float
    """Tokens of the slowest stream / of the median one, while all of them run."""
    tokens_per_s: float
    """Of all streams together."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    args = parser.parse_args()
    print(f"the gateway between a scripted worker and its clients; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    few, many = asyncio.run(measure(args.repeats, args.tokens))
    cpu_us, slowest = statistics.median(x.cpu_us for x in few), statistics.median(x.slowest for x in many)
    gates = [
        Gate(f"gateway CPU per token, {COSTED_STREAMS} streams", cpu_us, 50, " µs"),
        Gate(f"slowest of {EVEN_STREAMS} streams / their median", slowest, 0.8, at_least=True),
    ]
    print("gates", *[gate.line() for gate in gates], sep="\n")
    return 0 if all(gate.holds for gate in gates) else 1


async def measure(repeats: int, tokens: int) -> tuple[list[Served], list[Served]]:
    few, many = list[Served](), list[Served]()
    async with gateway() as supervisor, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, Target(f"http://127.0.0.1:{supervisor.port}"))
        assert supervisor.gateway is not None
        for _ in range(repeats):
            for streams, served in ((COSTED_STREAMS, few), (EVEN_STREAMS, many)):
                served.append(one := await serve(client, supervisor.gateway.pid, streams, tokens))
                costs = f"{number(one.cpu_us)} µs of CPU per token at {number(one.tokens_per_s)} tokens/s"
                print(f"  {streams:>3} streams: {costs}, slowest / median {one.slowest:.2f}", flush=True)
    return few, many


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str = "tiny"


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[ScriptedSupervisor]:
    """The gateway's process, and a worker that has joined it."""
    supervisor = ScriptedSupervisor([slot()], {"log_level": "warning"})  # 200 requests are 200 lines
    worker: asyncio.subprocess.Process | None = None
    try:
        await supervisor.start_gateway()
        where = [str(supervisor.data), WORKER, str(TOKENS_PER_S)]
        worker = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.paced_worker", *where)
        yield supervisor
    finally:
        if worker is not None:
            worker.kill()
            await worker.wait()
        await supervisor.stop()


async def serve(client: Client, pid: int, streams: int, tokens: int) -> Served:
    """From the first moment at which every stream has begun to the first at which one is over."""
    answers: dict[int, Answer] = {}
    marks: list[tuple[cpu.Reading, list[int], float]] = []

    def on_token(answer: Answer) -> None:
        answers[id(answer)] = answer
        if (not marks and len(answers) == streams) or (len(marks) == 1 and answer.is_over):
            marks.append((cpu.read({ROLE: pid}), [len(x.text_at) for x in answers.values()], asyncio.get_running_loop().time()))

    await asyncio.gather(*[client.ask("Write a story.", tokens, on_token) for _ in range(streams)])
    (before, then, began), (after, now, ended) = marks
    counts = [b - a for a, b in zip(then, now, strict=True)]
    cpu_s = cpu.spent(before, after, ROLE).total_s
    even = min(counts) / statistics.median(counts)
    return Served(1e6 * cpu_s / sum(counts), even, sum(counts) / (ended - began))


if __name__ == "__main__":
    sys.exit(main())
