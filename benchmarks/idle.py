"""What omlxd costs while nobody asks anything: CPU of each of its processes, with a model loaded that has just answered."""

import argparse
import os
import sys
import time
from pathlib import Path

import psutil

from benchmarks.gates import Gate
from tests.stands.models import smollm2_dir
from tests.stands.server import Server, running

NAME = "bench"
LIMIT_PERCENT = 1.0
"""Of one core, all processes together."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="after the answer, not measured")
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    args = parser.parse_args()
    with running({NAME: (args.model or smollm2_dir()).resolve()}) as server:
        assert server.chat(NAME, "Hello!", max_tokens=8).status == 200
        time.sleep(args.settle_seconds)
        percent = idle_percent(server, args.seconds)
    print(f"idle for {args.seconds:.0f} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for role, used in percent.items():
        print(f"  {role:<24}{used:6.2f} % of a core")
    gate = Gate("CPU of the idle tree / one core", sum(percent.values()), LIMIT_PERCENT, " %")
    print("gates", gate.line(), sep="\n")
    return 0 if gate.holds else 1


def idle_percent(server: Server, seconds: float) -> dict[str, float]:
    """Of one core, by what each process is; nothing is asked of the server meanwhile."""
    roles = roles_of(server)
    before = cpu_s(server)
    time.sleep(seconds)
    after = cpu_s(server)
    return {roles.get(pid, f"pid {pid}"): 100 * (used - before.get(pid, 0.0)) / seconds for pid, used in after.items()}


def roles_of(server: Server) -> dict[int, str]:
    status = server.status()
    named = {entry["pid"]: entry.get("id", entry.get("name")) for entry in [*status["models"], *status["children"]]}
    return {status["pid"]: "supervisor", **named}


def cpu_s(server: Server) -> dict[int, float]:
    used: dict[int, float] = {}
    for process in server.family():
        try:
            used[process.pid] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:  # a look at the store that was just over
            continue
    return used


if __name__ == "__main__":
    sys.exit(main())
