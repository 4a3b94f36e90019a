"""Time and CPU to the first token of a long prompt: never seen, just seen, and after the process that held it was killed."""

import time
from dataclasses import dataclass

from benchmarks import cpu
from benchmarks.client import Client
from benchmarks.prompts import Prompts
from benchmarks.servers import Contender


@dataclass(frozen=True, slots=True)
class FirstToken:
    wall_s: float
    cpu_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ttft:
    cold: FirstToken
    warm: FirstToken
    after_kill: FirstToken
    """To a successor that is ready, timed from the request."""
    after_kill_whole_s: float
    """Timed from the kill: with process start, load and warm-up."""


async def measure(contender: Contender, client: Client, prompts: Prompts, prompt_tokens: int) -> Ttft:
    prompt = prompts.fresh(prompt_tokens)
    cold = await _first_token(contender, client, prompt)
    warm = await _first_token(contender, client, prompt)
    contender.settle()
    whole_s = None
    if contender.outlives_its_model:
        whole_s = await _asked_at_once(contender, client, prompt)
        contender.settle()
    killed_at = time.perf_counter()
    contender.kill_model()
    contender.revive()
    await client.ask("Hi", 1)
    ready_s = time.perf_counter() - killed_at
    after = await _first_token(contender, client, prompt)
    if whole_s is None:  # without a cold tier this prompt is computed anew, and once is enough to know how long that takes
        whole_s = ready_s + after.wall_s
    return Ttft(cold, warm, after, whole_s)


async def _asked_at_once(contender: Contender, client: Client, prompt: str) -> float:
    killed_at = time.perf_counter()
    contender.kill_model()
    answer = await client.ask(prompt, 1)
    return answer.first_at - killed_at


async def _first_token(contender: Contender, client: Client, prompt: str) -> FirstToken:
    pids = contender.pids()
    before = cpu.read(pids)
    readings: list[cpu.Reading] = []

    answer = await client.ask(prompt, 1, lambda _: readings.append(cpu.read(pids)))
    used = cpu.spent(before, readings[0], contender.engine_role)
    return FirstToken(answer.first_token_s, used.total_s, answer.prompt_tokens, answer.cached_tokens)
