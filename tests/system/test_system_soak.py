"""Two hundred requests at random, most of which nobody stays for, and then nothing is left of any of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import psutil
import pytest

from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.server import Server, running

MIB = 2**20
HALF = int(os.environ.get("SOAK_REQUESTS", "200")) // 2
AT_ONCE = 20
"""More than a batch holds, so that some are left while they wait."""
SEED = int(os.environ.get("SOAK_SEED", "1"))
RSS_MIB = {"supervisor": 4, "gateway": 8, "worker": 24}
"""What the second half may add: allocators keep what they once had."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")


@dataclass(frozen=True)
class Plan:
    streams: bool
    words: int
    max_tokens: int
    leaves_after_s: float | None = None
    deadline_s: float | None = None

    def body(self, chance: random.Random) -> dict[str, object]:
        content = " ".join(chance.choices(["the", "quick", "people", "of", "France", "story", "went"], k=self.words))
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
        priority = "interactive" if chance.random() < 0.15 else "batch"  # so that some are put aside
        body |= {"stream": self.streams, "max_tokens": self.max_tokens, "priority": priority}
        return body | ({} if self.deadline_s is None else {"deadline_s": self.deadline_s})


def plans(chance: random.Random) -> Iterator[Plan]:
    """A client that leaves has asked for more than anyone could compute until the test looks."""
    while True:
        streams, words = chance.random() < 0.5, chance.choice([3, 40, 300, 900])
        match chance.choice(["stays", "leaves", "leaves", "deadline"]):
            case "stays":
                yield Plan(streams, words, chance.randrange(1, 24))
            case "leaves":
                yield Plan(streams, words, 6000, leaves_after_s=chance.choice([0.0, 0.02, 0.1, 0.4, 1.0]))
            case _:
                yield Plan(streams, words, 6000, deadline_s=chance.choice([0.01, 0.1, 0.5, 1.0]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tiny = tiny_model(tmp_path_factory.mktemp("soak") / "tiny", num_hidden_layers=8, max_position_embeddings=8192)
    settings = {"cache": {"hot_cache_max_size": "8MB"}, "scheduler": {"max_concurrent_requests": 4}}
    with running({"tiny": tiny}, settings) as server:
        server.ctl("load", "tiny")
        yield server


async def test_cancels_deadlines_and_disconnects_leave_nothing_running_open_or_held(server: Server) -> None:
    chance = random.Random(SEED)
    stream_of_plans = plans(chance)
    processes = {role: psutil.Process(server.pid_of(name)) for role, name in (("gateway", "gateway"), ("worker", "tiny"))}
    processes["supervisor"] = psutil.Process(server.status()["pid"])
    taken: list[tuple[dict[str, int], dict[str, int]]] = []
    outcomes = Counter[str]()
    for _ in range(2):
        async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            room = asyncio.Semaphore(AT_ONCE)
            plans_now = [next(stream_of_plans) for _ in range(HALF)]
            outcomes += Counter(await asyncio.gather(*[carry_out(session, room, plan, chance) for plan in plans_now]))
        await asyncio.to_thread(until_nothing_runs, server)
        taken.append((
            {role: process.memory_info().rss for role, process in processes.items()},
            {role: await asyncio.to_thread(open_files, process) for role, process in processes.items()},
        ))  # fmt: skip
    assert min(outcomes[kind] for kind in ("whole", "left", "deadline")) >= HALF // 5, outcomes
    assert set(outcomes) <= {"whole", "left", "deadline"}, outcomes
    (before_bytes, before_files), (after_bytes, after_files) = taken
    opened = {role: after_files[role] - before_files[role] for role in processes}
    assert max(opened.values()) <= 0, opened
    grown_mib = {role: (after_bytes[role] - before_bytes[role]) / MIB for role in processes}
    assert all(grown_mib[role] <= limit for role, limit in RSS_MIB.items()), grown_mib
    assert server.pid_of("tiny") == processes["worker"].pid, "the worker has survived it all"
    assert server.model("tiny")["beat"]["parks"] > 0, "batch rows made way now and then"


def open_files(process: psutil.Process) -> int:
    """The fewest within a second: a connection takes a moment to close."""
    counts = []
    for _ in range(20):
        counts.append(process.num_fds())
        time.sleep(0.05)
    return min(counts)


async def carry_out(session: aiohttp.ClientSession, room: asyncio.Semaphore, plan: Plan, chance: random.Random) -> str:
    async with room:
        try:
            async with asyncio.timeout(plan.leaves_after_s):
                return await ask(session, plan.body(chance))
        except TimeoutError:
            return "left"


async def ask(session: aiohttp.ClientSession, body: dict[str, object]) -> str:
    """How it ended: whole, deadline, or what was wrong."""
    async with session.post("/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=patient_s(60))) as response:
        text = await response.text()
    if response.status == 200 and not body["stream"]:
        return "whole" if json.loads(text)["choices"][0]["finish_reason"] == "length" else text
    if response.status == 200 and text.endswith("data: [DONE]\n\n"):
        return "whole"
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    return "deadline" if last.get("error", {}).get("code") == "deadline" else f"{response.status}: {text[-300:]}"


def until_nothing_runs(server: Server) -> None:
    """Within five seconds of the last client's end."""
    until = time.monotonic() + patient_s(5)
    while held := still_held(server):
        assert time.monotonic() < until, held
        time.sleep(0.1)


def still_held(server: Server) -> dict[str, object]:
    """What is not zero: requests in the gateway, leases in the supervisor, sequences in the worker."""
    slot = server.model("tiny")
    beat = slot["beat"] or {}
    counts = {"gateway": server.get("/api/status").json()["gateway"]["inflight"]}
    counts |= {"leases": slot["leases"], "waiting": slot["waiting"]}
    counts |= {"running": beat.get("running"), "queued": beat.get("waiting"), "kv_bytes": beat.get("kv_bytes")}
    counts |= {"parked": beat.get("parked")}
    return {name: count for name, count in counts.items() if count}
