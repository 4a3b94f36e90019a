"""Every way in which blocks on disk go bad, from outside: the cold answer, HTTP 200, fewer cached tokens, a counter raised.

The model keeps nothing in RAM here, so what is asked again comes from the disk or is computed.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stands.models import tiny_model
from tests.stands.server import Server, running

SYSTEM = "The quick brown fox jumps over the lazy dog and the people of the world. " * 25
BLOCK = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
    with running({"tiny": model}, {"models": {"tiny": {"cache": "ssd"}}}) as found:
        yield found


def blocks(server: Server) -> list[Path]:
    """Root first: every full block of the one prompt in the store."""
    return sorted((server.home / "cache").rglob("*.safetensors"), key=start_of)


def start_of(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return int(file.metadata()["start"])


def flip(found: list[Path]) -> None:
    data = bytearray(found[2].read_bytes())
    data[len(data) // 2] ^= 1
    found[2].write_bytes(data)


def truncate(found: list[Path]) -> None:
    os.truncate(found[2], found[2].stat().st_size - 100)


def empty(found: list[Path]) -> None:
    os.truncate(found[2], 0)


def swap(found: list[Path]) -> None:
    aside = found[2].with_suffix(".aside")
    found[2].rename(aside)
    found[4].rename(found[2])
    aside.rename(found[4])


def delete(found: list[Path]) -> None:
    found[2].unlink()


def directory(found: list[Path]) -> None:
    found[2].unlink()
    found[2].mkdir()


def forbid(found: list[Path]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    found[2].chmod(0)


def misses(server: Server) -> int:
    counters = (server.model("tiny")["beat"] or {}).get("cache", {})
    return sum(n for name, n in counters.items() if name.startswith("miss_"))


@pytest.mark.parametrize("harm", [flip, truncate, empty, swap, delete, directory, forbid])
def test_a_damaged_block_costs_its_tokens_and_nothing_else(server: Server, harm: Callable[[list[Path]], None]) -> None:
    salt = harm.__name__
    server.ctl("unload", "tiny")  # so that nothing is being written any more
    server.ctl("cache", "clear", "--yes")
    cold = server.chat("tiny", "hello", system=SYSTEM, max_tokens=12, cache_salt=salt)
    assert cold.cached_tokens == 0
    server.ctl("unload", "tiny")
    whole = server.chat("tiny", "hello", system=SYSTEM, max_tokens=12, cache_salt=salt)
    assert (whole.text, whole.cached_tokens >= 5 * BLOCK) == (cold.text, True)
    server.ctl("unload", "tiny")
    harm(blocks(server))
    server.ctl("load", "tiny")
    before = misses(server)
    answer = server.chat("tiny", "hello", system=SYSTEM, max_tokens=12, cache_salt=salt)
    assert (answer.status, answer.text, answer.cached_tokens) == (200, cold.text, 2 * BLOCK)
    server.wait_for(lambda: misses(server) > before, 5, "the miss is counted")
    again = server.chat("tiny", "hello", system=SYSTEM, max_tokens=12, cache_salt=salt)
    assert (again.text, again.cached_tokens) == (cold.text, whole.cached_tokens), "one prefill repairs the chain"


@pytest.mark.real
def test_the_real_model_answers_the_same_cold_hot_from_disk_and_after_a_kill(smollm2: Path) -> None:
    from tests.stands.equality import assert_same_greedy
    from worker.text import Text

    system = "You are a careful librarian. Answer every question in one short sentence and never guess. " * 20
    question = "Which city is the capital of France?"
    with running({"smollm2": smollm2}) as server:

        def ask():
            return server.chat("smollm2", question, system=system, max_tokens=16)

        cold, hot = ask(), ask()
        server.ctl("unload", "smollm2")
        cold_tier = ask()
        os.kill(server.pid_of("smollm2"), signal.SIGKILL)
        killed = ask()
        texts = Text.open(smollm2)
        ids = texts.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])
        for answer in (hot, cold_tier, killed):
            assert answer.cached_tokens >= len(ids) - 64
            assert_same_greedy(smollm2, ids, cold.text, answer.text)
