"""Three models under a budget for two, clients of all kinds, and every few seconds a process that is shot.

Every answer that is completed is the right one, every other one ends with an error, and nothing is left behind.
The storm of the suite is short; `make storm` runs one of three minutes (SOAK_S, SOAK_SEED).
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.stands.equality import assert_same_greedy
from tests.stands.looking import Looking
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.server import Server, running
from tests.stands.storm import Ask, Outcome, carry_out, user
from worker.text import Text

SOAK_S = float(os.environ.get("SOAK_S", "15"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
CLIENTS = 6
PROMPTS = [
    "Tell me a long story about the people.",
    "The quick brown fox",
    "How are you today?",
    "def main(): return [x for x in",
]
SHOT_EVERY_S = (1.0, 5.0)
GATEWAY_EVERY_S = 20.0
"""Five deaths in a minute would rightly end the server."""
RECOVERED_S = 60.0
FILE_THREADS = (os.cpu_count() or 1) + 4
"""What asyncio keeps for files once they were needed; a thread for each dead process would be more."""
GROWTH_BYTES = 16 * 2**20
"""Of the supervisor: a thousand events and the last lines of every log stay in memory."""
SETTINGS = {
    "memory": {"max_model_memory": "1600MB"},  # a worker's runtime alone is charged 614 MiB
    "timers": {"fair_wait_s": 1, "min_resident_s": 0.5, "crash_window_s": 4, "probe_after_s": 4},
}


@dataclass(frozen=True)
class Shot:
    name: str
    at: float


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As many layers as no other has: an answer of the wrong model is a wrong answer."""
    home = tmp_path_factory.mktemp("storm")
    return {name: tiny_model(home / name, num_hidden_layers=layers) for name, layers in (("a", 4), ("b", 6), ("c", 8))}


@pytest.fixture
def server(models: dict[str, Path]) -> Iterator[Server]:
    with running(models, SETTINGS) as server:
        yield server


def test_in_a_storm_of_kills_every_answer_is_right_or_an_error_and_nothing_is_left(
    server: Server, models: dict[str, Path]
) -> None:
    alone = {ask: carry_out(server.port, ask).text for ask in asks()}
    assert len(set(alone.values())) == len(alone), "an answer has to tell which request it belongs to"
    before = footprint(server)
    outcomes, shots = storm(server, list(alone))
    counted = Counter(outcome.how for outcome in outcomes)
    codes = Counter(outcome.code for outcome in outcomes if outcome.code)
    print(f"seed {SEED}: shot {Counter(shot.name for shot in shots)}, answers {counted}, errors {codes}")
    whole = [outcome for outcome in outcomes if outcome.how == "whole"]
    for outcome in whole:
        ask = replace(outcome.ask, streams=False, leaves_after_bytes=None)
        assert_same_greedy(models[ask.model], prompt_ids(models[ask.model], ask), alone[ask], outcome.text)
    for outcome in outcomes:
        if outcome.how == "aborted":
            killed = [shot for shot in shots if shot.name == "gateway" and outcome.begun - 1 < shot.at < outcome.ended]
            assert killed, f"cut, though no gateway died: {outcome}"

    with Looking(server) as look:
        for ask in alone:
            answers_again(server, ask, alone[ask], models)
        look.until_nothing_is_left()
    after = footprint(server)
    assert (after.files, after.processes) == (before.files, before.processes)
    assert after.threads <= before.threads + FILE_THREADS
    assert after.bytes - before.bytes < GROWTH_BYTES
    assert "Traceback" not in server.said()

    assert len(shots) >= SOAK_S / 6 and counted["whole"] >= SOAK_S / 6 and counted["left"] >= 1


def asks() -> list[Ask]:
    return [
        Ask(dialect, model, prompt, max_tokens)
        for model in ("a", "b", "c")
        for dialect in ("chat", "completions")
        for prompt, max_tokens in zip(PROMPTS, (60, 24, 8, 250), strict=True)
    ]


def prompt_ids(model: Path, ask: Ask) -> list[int]:
    text = Text.open(model)
    if ask.dialect == "chat":
        return text.encode_chat([{**user(ask.prompt)}])
    return text.encode_text(ask.prompt)


def storm(server: Server, alone: list[Ask]) -> tuple[list[Outcome], list[Shot]]:
    over = time.monotonic() + SOAK_S
    shots: list[Shot] = []
    marksman = threading.Thread(target=shoot, args=(server, over, shots))
    marksman.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask_on, server.port, alone, random.Random(SEED * 100 + n), over) for n in range(CLIENTS)]
        outcomes = [outcome for client in clients for outcome in client.result()]
    marksman.join()
    return outcomes, shots


def ask_on(port: int, alone: list[Ask], chance: random.Random, over: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while time.monotonic() < over:
        leaves = chance.randrange(50, 2000) if chance.random() < 0.15 else None
        ask = replace(chance.choice(alone), streams=leaves is not None or chance.random() < 0.5, leaves_after_bytes=leaves)
        outcomes.append(carry_out(port, ask))
        if outcomes[-1].how in ("failed", "aborted"):
            time.sleep(0.2)  # as clients do
    return outcomes


def shoot(server: Server, over: float, shots: list[Shot]) -> None:
    chance = random.Random(SEED)
    with Looking(server) as look:
        while time.monotonic() < over - 1:
            time.sleep(chance.uniform(*SHOT_EVERY_S))
            name, pid = chance.choice(targets(look.status(), shots, loading_too=chance.random() < 0.1) or [("", 0)])
            if pid:
                shots.append(Shot(name, time.monotonic()))
                os.kill(pid, signal.SIGKILL)


def targets(status: dict[str, object], shots: list[Shot], *, loading_too: bool) -> list[tuple[str, int]]:
    """Busy workers come up more often: a death while nothing runs costs nobody anything. Loads come up seldom: where they take
    longer than it is from shot to shot, nothing would ever be loaded.
    """
    workers = [(m["id"], m["pid"]) for m in status["models"] if m["pid"] and (m["state"] == "ready" or loading_too)]
    busy = [(m["id"], m["pid"]) for m in status["models"] if m["pid"] and m["leases"]]
    others = [(c["name"], c["pid"]) for c in status["children"] if c["pid"] and may_be_shot(c["name"], shots)]
    return workers + 4 * busy + others


def may_be_shot(name: str, shots: list[Shot]) -> bool:
    return not any(shot.name == name and time.monotonic() - shot.at < GATEWAY_EVERY_S for shot in shots)


def answers_again(server: Server, ask: Ask, expected: str, models: dict[str, Path]) -> None:
    """Without anybody's help, once quarantines are over."""
    until = time.monotonic() + patient_s(RECOVERED_S / 2)
    while (outcome := carry_out(server.port, ask)).how != "whole":
        assert time.monotonic() < until, outcome
        time.sleep(0.5)
    assert_same_greedy(models[ask.model], prompt_ids(models[ask.model], ask), expected, outcome.text)


@dataclass(frozen=True)
class Footprint:
    """Of the supervisor while no model is loaded, and how many processes belong to its home."""

    files: int
    threads: int
    processes: int
    bytes: int


def footprint(server: Server) -> Footprint:
    with Looking(server) as look:
        for model in look.status()["models"]:
            look.call("unload", {"model": model["id"]}, timeout_s=None)
        server.wait_for(lambda: all(c["state"] == "running" for c in look.status()["children"]), 60, "all attendants are back")
        look.until_nothing_is_left()
    assert server.process is not None
    supervisor = psutil.Process(server.process.pid)
    time.sleep(1)  # for threads that only have to end, and connections that only have to close
    return Footprint(supervisor.num_fds(), supervisor.num_threads(), len(of_home(server.home)), supervisor.memory_info().rss)


def of_home(home: Path) -> list[int]:
    """Children name the home's socket on their command line, also those that nobody is the parent of any more."""
    return [process.pid for process in psutil.process_iter() if str(home) in " ".join(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
