"""Memory that runs short, from outside: what is trimmed, who goes, who stays, and that everybody is told why.

The share of memory that counts as short is a setting that takes effect at once: it is put just below what the server takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.stands.clients import Streamed, stream
from tests.stands.models import tiny_model
from tests.stands.server import Server, running

MIB, GIB = 2**20, 2**30
NEVER = float("inf")
"""Not a multiple of what the server takes: with few processes that can be less than other programs take of the machine."""
LIMIT = 1800 * MIB
"""Room for two of these models and the server's own processes."""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs control groups")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many layers that a stream outlasts a look at the memory or two."""
    return tiny_model(tmp_path_factory.mktemp("slow") / "slow", num_hidden_layers=24)


def look(server: Server) -> dict[str, object]:
    return server.get("/api/status").json()


def model(server: Server, name: str) -> dict[str, object]:
    return next(each for each in look(server)["models"] if each["id"] == name)


def marks(server: Server, soft: float, hard: float = 1.0, critical: float = 1.0) -> None:
    """Shares of the limit of all processes, in terms of what they take now."""
    now = look(server)["measured_bytes"] / LIMIT
    settings = json.loads((server.home / "settings.json").read_text())
    shares = {"soft_threshold": soft * now, "hard_threshold": hard * now, "critical_threshold": critical * now}
    settings["memory"] |= {name: max(0.01, min(1.0, share)) for name, share in shares.items()}
    (server.home / "settings.json").write_text(json.dumps(settings))
    server.ctl("reload")


def pressure_is(server: Server, level: str) -> None:
    server.wait_for(lambda: look(server)["pressure"] == level, 20, f"pressure is {level}")


@contextlib.contextmanager
def streaming(server: Server, model: str, tokens: int) -> Iterator[Streamed]:
    got = Streamed()
    thread = threading.Thread(target=stream, args=(server, model, tokens, got))
    thread.start()
    server.wait_for(lambda: len(got.arrivals) > 3, 60, "the stream runs")
    yield got
    thread.join()


SETTINGS = {
    "memory": {"max_process_memory": LIMIT, "measure_s": 0.3},
    "timers": {"memory_wait_s": 1, "min_resident_s": 1},
}


def test_short_memory_takes_hot_caches_then_idle_models_and_only_at_the_last_a_busy_one(slow: Path, tiny: Path) -> None:
    with running({"slow": slow, "tiny": tiny, "other": tiny}, SETTINGS) as server:
        for name in ("slow", "tiny"):
            assert server.chat(name, "Tell me of the fox and the dog. " * 30, max_tokens=4).status == 200
        server.wait_for(lambda: (server.model("tiny")["beat"] or {}).get("hot_bytes"), 10, "something is cached")
        server.wait_for(lambda: model(server, "slow")["measured_bytes"] > 20 * MIB, 10, "both are measured")

        assert server.model("tiny")["beat"]["mx_cache_bytes"] > 0
        marks(server, soft=0.8, hard=NEVER, critical=NEVER)
        pressure_is(server, "soft")
        server.wait_for(lambda: server.model("tiny")["beat"]["hot_bytes"] == 0, 10, "the hot cache is given back")
        server.wait_for(lambda: server.model("tiny")["beat"]["mx_cache_bytes"] == 0, 10, "pools are given back")
        assert {each["id"] for each in look(server)["models"] if each["pid"]} == {"slow", "tiny"}
        assert model(server, "tiny")["hot_granted_bytes"] < 256 * MIB

        with streaming(server, "slow", 200) as got:
            marks(server, soft=0.4, hard=0.5, critical=NEVER)
            server.wait_for(lambda: model(server, "tiny")["pid"] is None, 20, "the idle model goes")
            refused = server.chat("other", "hello", max_tokens=2)
            shown = server.ctl("status").stdout
        assert (got.done, got.error, got.tokens) == (True, None, 200), "the busy one is not cut"
        assert (refused.status, refused.error["code"]) == (429, "busy") and "memory is short" in str(refused.error["message"])
        assert "pressure" in shown and "hard: " in shown, shown

        marks(server, soft=NEVER, hard=NEVER, critical=NEVER)
        pressure_is(server, "none")
        with streaming(server, "slow", 2000) as got:
            marks(server, soft=0.7, hard=0.7, critical=0.8)
        assert not got.done and isinstance(got.error, dict) and got.error["code"] == "oom", got
        assert "stopped before the machine ran out of memory" in got.error["message"]
        marks(server, soft=NEVER, hard=NEVER, critical=NEVER)
        server.wait_for(lambda: server.chat("slow", "hello", max_tokens=2).status == 200, 30, "it is served again")
        assert model(server, "slow")["restarts"] == 0


def test_a_hot_cache_makes_room_for_another_model_and_grows_back_when_that_is_gone(tiny: Path) -> None:
    settings = {"memory": {"max_model_memory": "1500MB"}, "cache": {"hot_cache_max_size": "500MB"}}
    with running({"a": tiny, "b": tiny}, settings) as server:
        server.ctl("load", "a")
        assert model(server, "a")["hot_granted_bytes"] == 500 * MIB
        server.ctl("load", "b")
        status = look(server)
        first, second = status["models"]
        assert first["pid"] and second["pid"], "nobody was evicted for want of what only a cache had"
        assert first["hot_granted_bytes"] < 300 * MIB
        assert status["charged_bytes"] == first["charged_bytes"] + second["charged_bytes"] <= status["budget_bytes"]
        server.ctl("unload", "b")
        server.wait_for(lambda: model(server, "a")["hot_granted_bytes"] == 500 * MIB, 25, "it grows back")


def test_two_limits_are_shown_and_the_one_of_the_weights_is_enforced(slow: Path, tiny: Path) -> None:
    weights = sum(file.stat().st_size for file in slow.glob("*.safetensors"))
    settings = {"memory": {"max_model_weights": weights + 1000, "max_process_memory": LIMIT}, "timers": {"min_resident_s": 0.1}}
    with running({"slow": slow, "tiny": tiny}, settings) as server:
        server.ctl("load", "slow")
        assert server.chat("tiny", "hello", max_tokens=2).status == 200
        status = look(server)
        assert [each["id"] for each in status["models"] if each["pid"]] == ["tiny"], "together they are too heavy"
        assert status["weights_limit_bytes"] == weights + 1000 and status["process_limit_bytes"] == LIMIT
        assert 0 < status["weights_bytes"] < weights
        shown = server.ctl("status").stdout
        assert "(memory.max_model_weights)" in shown and "(memory.max_process_memory)" in shown
        assert "memory.max_process_memory - 0.3 GiB for the server itself" in shown


BALLAST = """
import sys
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print(len(held), flush=True)
sys.stdin.read()
"""


def test_another_program_that_grows_shrinks_the_budget_and_it_comes_back(tiny: Path) -> None:
    with running({"tiny": tiny}, {"memory": {"memory_tier": "custom"}}) as server:
        before, most = (look(server)[name] for name in ("budget_bytes", "budget_most_bytes"))
        # Far more than is asserted: what else runs on this machine grows and shrinks, too.
        size = max(4 * GIB, psutil.virtual_memory().available - most + GIB)
        if size > min(6 * GIB, psutil.virtual_memory().available - 2 * GIB):
            pytest.skip(f"it would take {size / GIB:.1f} GiB to see it on this machine")
        with subprocess.Popen(
            [sys.executable, "-c", BALLAST, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None and other.stdout.readline()
            server.wait_for(lambda: look(server)["budget_bytes"] < before - GIB // 2, 20, "the budget shrinks")
            status = look(server)
            assert "now less: other programs hold" in status["budget_detail"] and "of RAM" in status["budget_detail"]
            less = look(server)["budget_bytes"]
            other.communicate()
        server.wait_for(lambda: look(server)["budget_bytes"] > less + GIB // 4, 20, f"it grows again from {less}")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group whose members the kernel kills for memory beyond that."""
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"omlxd-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(limit_bytes))
    except OSError as e:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {e}")
    try:
        yield group
    finally:
        group.rmdir()


@linux_only
def test_a_worker_that_the_kernel_kills_for_memory_is_loaded_once_more_with_more_set_aside(tmp_path: Path) -> None:
    big = tiny_model(tmp_path / "big", intermediate_size=200_000)
    with memory_group(150 * MIB) as group, running({"big": big}) as server, ThreadPoolExecutor(1) as pool:
        estimate = model(server, "big")["estimate_bytes"]
        asked = pool.submit(server.chat, "big", "hello", max_tokens=2)
        server.wait_for(lambda: model(server, "big")["pid"], 20, "it is started")
        (group / "cgroup.procs").write_text(str(model(server, "big")["pid"]))
        assert asked.result().status == 200, "whoever waited is served by the second try"
        after = model(server, "big")
        assert after["restarts"] == 1 and "ran out of memory" in after["last_error"], after["last_error"]
        assert after["charged_bytes"] - after["hot_granted_bytes"] > estimate
        kept = json.loads((server.home / "state" / "models.json").read_text())
        assert kept["big"]["need_bytes"] > estimate
        server.ctl("reset", "big")
        assert json.loads((server.home / "state" / "models.json").read_text()) == {}
