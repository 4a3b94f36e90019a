"""Two models at work on one machine, from outside: a prompt of one does not stop the streams of the other, prompts of both take
turns, and a worker that is stuck in the middle of its turn stops nobody.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.stands.clients import at_once
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.server import Answer, Server, running

MOST_BETWEEN_TOKENS = 192
LEAST_TOKENS = 11
ATTEMPTS = 3
"""Other work on this machine may stop a process for as long as it likes; a rule that is broken is broken every time."""
PATIENCE_S = 150.0
"""A prompt that takes two seconds here can take a minute where ten others compute."""
WORDS = "the people of the world and the long way that they went to get from here to there "


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with so many layers that a long prompt takes seconds."""
    path = tmp_path_factory.mktemp("slow") / "slow"
    return tiny_model(path, num_hidden_layers=24, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose prompts take much longer per token than the other's steps."""
    shape: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    path = tmp_path_factory.mktemp("wide") / "wide"
    return tiny_model(path, num_hidden_layers=8, max_position_embeddings=8192, **shape)


def prompt(number: int, repeats: int) -> str:
    return f"{number} " + WORDS * repeats


def ask(server: Server, model: str, content: str) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return server.post("/v1/chat/completions", body, timeout_s=PATIENCE_S)


@contextmanager
def streaming(server: Server, model: str) -> Iterator[list[float]]:
    """When each token of a long answer came, as long as the block runs; there are some by its beginning."""
    arrivals: list[float] = []
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient_s(60))
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 6000,
        "ignore_eos": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    body["messages"] = [{"role": "user", "content": "Tell me a long story."}]
    link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, over = link.getresponse(), threading.Event()

    def read() -> None:
        while not over.is_set() and (line := answer.readline()):
            if line.startswith(b'data: {"') and b'"content"' in line:
                arrivals.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        server.wait_for(lambda: len(arrivals) > 3, 30, "the stream runs")
        yield arrivals
        assert reader.is_alive(), "the stream has to outlast what happens beside it"
    finally:
        over.set()
        reader.join()
        link.close()


def chunks(server: Server, model: str) -> list[tuple[float, int]]:
    """When each piece of a prompt was done, and its tokens, as the worker's log says."""
    found = re.findall(r"prefilled (\d+) tokens until ([\d.]+)", (server.home / "logs" / f"{model}.log").read_text())
    return [(float(at), int(tokens)) for tokens, at in found]


def told(server: Server, before: int) -> int:
    """Prompt tokens of b in its log, beyond the first lines."""
    return sum(tokens for _, tokens in chunks(server, "b")[before:])


def test_a_stream_goes_on_while_another_model_prefills_a_long_prompt(slow: Path, wide: Path) -> None:
    with running({"a": slow, "b": wide}, {"server": {"log_level": "debug"}}) as server:
        for model in ("a", "b"):
            assert server.chat(model, "hello", max_tokens=2).status == 200
        seen: list[tuple[int, int]] = []
        for attempt in range(ATTEMPTS):
            before = len(chunks(server, "b"))
            with streaming(server, "a") as arrivals:
                begun = time.monotonic()
                answer = ask(server, "b", prompt(attempt, 84))
                ended = time.monotonic()
            assert answer.status == 200 and answer.json()["usage"]["prompt_tokens"] >= 1504
            server.wait_for(lambda n=before: told(server, n) >= 1504, 5, "the log says how the prompt was prefilled")
            new = chunks(server, "b")[before:]
            assert max(tokens for _, tokens in new) <= MOST_BETWEEN_TOKENS, "a chunk as if nobody decoded"
            within = [begun, *(at for at in arrivals if begun < at < ended), ended]
            most = max(sum(tokens for at, tokens in new if a < at <= b) for a, b in pairwise(within))
            seen.append((len(within) - 2, most))
            if len(within) - 2 >= LEAST_TOKENS and most <= MOST_BETWEEN_TOKENS:
                return
        raise AssertionError(f"tokens of the stream, and the most prompt tokens between two of them: {seen}")


def test_two_long_prompts_take_turns_and_one_alone_need_not(slow: Path) -> None:
    with running({"a": slow, "b": slow}) as server:
        for model in ("a", "b"):
            server.ctl("load", model)
        assert ask(server, "a", prompt(0, 30)).status == 200
        server.wait_for(lambda: beat(server, "a")["progress"] > 500, 5, "a heartbeat after the prompt")
        assert passed_on(server) == {"a": 0, "b": 0}
        answers = at_once([lambda m=m: ask(server, m, prompt(1, 110)) for m in ("a", "b")])
        assert [answer.status for answer in answers] == [200, 200]
        server.wait_for(lambda: min(passed_on(server).values()) >= 2, 5, "both have passed the turn on, chunk by chunk")


def test_prefill_turns_can_be_turned_off(slow: Path) -> None:
    with running({"a": slow, "b": slow}, {"scheduler": {"prefill_turns": "off"}}) as server:
        answers = at_once([lambda m=m: ask(server, m, prompt(1, 55)) for m in ("a", "b")])
        assert [answer.status for answer in answers] == [200, 200]
        server.wait_for(lambda: min(beat(server, m)["progress"] for m in ("a", "b")) > 1000, 5, "heartbeats after the prompts")
        assert max(passed_on(server).values()) <= 1, "what was held from the start"


def test_a_worker_that_is_stuck_in_its_turn_does_not_stop_the_other(slow: Path) -> None:
    with running({"a": slow, "b": slow}, {"scheduler": {"prefill_turn_s": 0.5}}) as server:
        for model in ("a", "b"):
            server.ctl("load", model)
        stuck = psutil.Process(server.pid_of("a"))
        first: list[Answer] = []
        asking = threading.Thread(target=lambda: first.append(ask(server, "a", prompt(1, 110))))
        asking.start()
        server.wait_for(lambda: beat(server, "a")["running"] == 1, 20, "the long prompt is being prefilled")
        os.kill(stuck.pid, signal.SIGSTOP)
        try:
            assert not first
            answer = ask(server, "b", prompt(2, 10))
            assert answer.status == 200
            assert stuck.status() == psutil.STATUS_STOPPED, "it was not its death that freed the turn"
        finally:
            os.kill(stuck.pid, signal.SIGCONT)
        asking.join()
        assert first[0].status == 200
        assert "kept its prefill turn" in server.said()


def beat(server: Server, model: str) -> dict[str, int]:
    return server.model(model)["beat"] or {"progress": 0, "running": 0, "turns_passed_on": 0}


def passed_on(server: Server) -> dict[str, int]:
    return {model: beat(server, model)["turns_passed_on"] for model in ("a", "b")}
