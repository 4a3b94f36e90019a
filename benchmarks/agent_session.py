"""A coding agent's session replayed over HTTP: does the prefix cache still hit when everything happens that happens in a day?

Every turn sends the whole conversation again with more in it, and a header at the head of the system prompt that is new each
time. One worker is killed within, and once the whole server starts anew. What could be reused is counted from the prompts'
tokens themselves; the exit status is 1 when less than 95 % of that came from the cache.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.prompts import WORDS
from tests.stands.models import smollm2_dir, tiny_model
from tests.stands.server import Server, running
from worker.text import Text
from worker.volatile import without_volatile_headers

GATE = 0.95
NAME = "agent"
HEADER = "x-anthropic-billing-header:"
TOOLS = ("read_file", "grep", "run_tests", "edit_file", "list_dir")
ANSWER_TOKENS = 8

Message = dict[str, object]


@dataclass(slots=True)
class Turn:
    prompt_tokens: int
    reusable_tokens: int
    """Of its prompt, in common with the longest earlier one."""
    cached_tokens: int
    seconds: float
    before: str
    """What happened before it, if anything."""


@dataclass(slots=True)
class Replay:
    turns: list[Turn] = field(default_factory=list[Turn])
    hot_tokens: int = 0
    cold_tokens: int = 0

    def sum_of(self, name: str) -> int:
        return sum(getattr(turn, name) for turn in self.turns)

    @property
    def hit_rate(self) -> float:
        """Of what could be reused."""
        used = sum(min(turn.cached_tokens, turn.reusable_tokens) for turn in self.turns)
        return used / max(1, self.sum_of("reusable_tokens"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_session", description=__doc__)
    parser.add_argument("--model", help="an MLX model directory, or smollm2; default: a tiny one with random weights")
    parser.add_argument("--turns", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as directory:
        model = Path(args.model) if args.model else tiny_model(Path(directory) / "tiny", max_position_embeddings=32768)
        model = smollm2_dir() if args.model == "smollm2" else model.resolve()
        with running({NAME: model}) as server:
            result = replay(server, Text.open(model), args.turns, on_turn=show)
    print_summary(result)
    return 0 if result.hit_rate >= GATE else 1


def replay(server: Server, text: Text, turns: int, on_turn=lambda number, turn: None) -> Replay:
    """Kills the worker after three eighths of the session, and starts the server anew after five eighths."""
    result, earlier = Replay(), list[list[int]]()
    for number, messages in enumerate(session(turns)):
        before = happening(server, result, number, turns)
        ids = text.encode_chat(without_volatile_headers(messages, (HEADER,)))
        began = time.perf_counter()
        body = {"model": NAME, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        answer = server.post("/v1/chat/completions", body, timeout_s=300)
        if answer.status != 200:
            raise SystemExit(f"turn {number + 1}: {answer}")
        turn = Turn(len(ids), shared(ids, earlier), answer.cached_tokens, time.perf_counter() - began, before)
        if (counted := answer.json()["usage"]["prompt_tokens"]) != len(ids):
            raise SystemExit(f"turn {number + 1}: the server counts {counted} prompt tokens, not {len(ids)}")
        earlier.append(ids)
        result.turns.append(turn)
        on_turn(number, turn)
    count_tiers(server, result)
    return result


def session(turns: int) -> Iterator[list[Message]]:
    """What an agent sends, turn by turn: its rules, the task, and all tool calls and their results so far."""
    chance = random.Random(11)

    def words(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    rules = f"You are a coding agent. {words(300)}"
    conversation: list[Message] = [{"role": "user", "content": f"Please fix this: {words(40)}"}]
    for number in range(turns):
        header = f"{HEADER} cc_version=2.1.37; cch={chance.getrandbits(20):05x}; turn={number}"
        system = [{"type": "text", "text": header}, {"type": "text", "text": rules}]
        yield [{"role": "system", "content": system}, *conversation]
        tool = chance.choice(TOOLS)
        conversation.append({"role": "assistant", "content": f"I will use {tool}. {words(12)}"})
        result = "\n".join(f"{line}: {words(8)}" for line in range(chance.randrange(2, 12)))
        conversation.append({"role": "user", "content": f"Result of {tool}:\n{result}"})


def happening(server: Server, result: Replay, number: int, turns: int) -> str:
    if number == turns * 3 // 8:
        count_tiers(server, result)
        os.kill(server.pid_of(NAME), signal.SIGKILL)
        return "worker killed"
    if number == turns * 5 // 8:
        count_tiers(server, result)
        server.stop()
        server.start()
        return "server restarted"
    return ""


def count_tiers(server: Server, result: Replay) -> None:
    """Adds what the present worker has restored so far, as its heartbeats tell it; call once per worker's life."""
    told = server.model(NAME)["beat"]["seq"]
    server.wait_for(lambda: server.model(NAME)["beat"]["seq"] >= told + 2, 5, "a heartbeat from after the last answer")
    counters = server.model(NAME)["beat"]["cache"]
    result.hot_tokens += counters["hot_tokens"]
    result.cold_tokens += counters["cold_tokens"]


def shared(ids: list[int], earlier: list[list[int]]) -> int:
    """Tokens in common with the longest common beginning among earlier prompts; the last one must be computed in any case."""
    longest = 0
    for other in earlier:
        same = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
        longest = max(longest, same)
    return min(longest, len(ids) - 1)


def show(number: int, turn: Turn) -> None:
    note = f"   ({turn.before})" if turn.before else ""
    line = (
        f"{number + 1:>3}  {turn.prompt_tokens:>6} tokens  {turn.reusable_tokens:>6} reusable  {turn.cached_tokens:>6} cached"
    )
    print(f"{line}  {turn.seconds:6.2f} s{note}", flush=True)


def print_summary(result: Replay) -> None:
    prompt, cached = result.sum_of("prompt_tokens"), result.sum_of("cached_tokens")
    print(f"\n  {len(result.turns)} turns, {prompt} prompt tokens")
    print(f"  from the cache           {cached:>8}   ({cached / prompt:.1%} of the prefill saved)")
    print(f"    from RAM               {result.hot_tokens:>8}   ({result.hot_tokens / prompt:.1%})")
    print(f"    from disk              {result.cold_tokens:>8}   ({result.cold_tokens / prompt:.1%})")
    verdict = "holds" if result.hit_rate >= GATE else "DOES NOT HOLD"
    print(f"  of what could be reused  {result.hit_rate:>8.1%}   (gate: at least {GATE:.0%}, {verdict})")


if __name__ == "__main__":
    sys.exit(main())
