"""What each process is made of and what it costs: the supervisor and the gateway stay small, idle means idle."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.stands.clients import stream
from tests.stands.server import Server, running

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_supervisor_and_gateway_never_map_mlx_and_the_worker_does(small: Server) -> None:
    small.ctl("load", "tiny")

    def maps_mlx(pid: int) -> bool:
        return "libmlx" in Path(f"/proc/{pid}/maps").read_text()

    assert not maps_mlx(small.status()["pid"])
    assert not maps_mlx(small.pid_of("gateway"))
    assert not maps_mlx(small.pid_of("text"))
    assert maps_mlx(small.pid_of("tiny"))


def test_supervisor_and_gateway_start_cheaply_and_stay_small(small: Server) -> None:
    for pid in (small.status()["pid"], small.pid_of("gateway")):
        process = psutil.Process(pid)
        times = process.cpu_times()
        assert times.user + times.system < 0.8, process.cmdline()  # 0.4, and more beside others: caches are shared
        memory = process.memory_full_info() if sys.platform == "linux" else process.memory_info()
        assert getattr(memory, "pss", memory.rss) < 80 * MIB, process.cmdline()


def test_an_idle_tree_uses_almost_no_cpu(small: Server) -> None:
    small.ctl("load", "tiny")
    processes = small.family()

    def cpu_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in processes)

    shares: list[float] = []
    while not shares or (shares[-1] >= 0.01 and len(shares) < 5):  # what a load leaves to do is done some time
        before, begun = cpu_s(), time.monotonic()
        time.sleep(8)
        shares.append((cpu_s() - before) / (time.monotonic() - begun))
    assert shares[-1] < 0.01, shares


@linux_only
def test_a_workers_main_thread_sleeps_through_an_answer(tiny: Path) -> None:
    """The engine's thread sends the rows: woken for each, the main thread would go to sleep again as often."""
    with running({"tiny": tiny}) as server:
        server.chat("tiny", "hello", max_tokens=2)
        status = Path(f"/proc/{server.pid_of('tiny')}/status")

        def sleeps() -> int:
            (line,) = (line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
            return int(line.split()[1])

        before = sleeps()
        answer = stream(server, "tiny", 1200)
        slept = sleeps() - before
    assert answer.tokens > 600
    assert slept < answer.tokens / 4
