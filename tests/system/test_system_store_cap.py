"""Three writers on credit, a janitor and twenty SIGKILLs: no wrong read, the cap held at every sample, nothing left over.

The real janitor process and real writers with a worker's own spill; this file plays the supervisor, with its ledger.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from cachestore.sweep import Policy, run_pass
from cachestore.verify import verify
from supervisor.credits import Credits, Limits, Look
from tests.stands.patience import patient_s
from tests.system.test_system_cache import used_bytes

CAP = 6 << 20
LIMITS = Limits(CAP, CAP * 9 // 10, 0)
WRITERS = 3
KILLS = 20
MOST_S = 50.0
WRITER = """
import os, random, select, sys, time
from pathlib import Path
from cachestore.store import Store
from tests.cachestore.cachestore_stand import make_block, make_chain, make_namespace
from worker.spill import Spill

FLOATS = 5000
spill = Spill(Store(Path(sys.argv[1]), make_namespace()), int(sys.argv[2]))
orders = b""
said_at = 0.0
while True:
    if select.select([0], [], [], 0)[0]:
        *lines, orders = (orders + (os.read(0, 4096) or sys.exit(0))).split(b"\\n")
        for line in lines:
            spill.add_credit(int(line))
    chain = make_chain(10, salt=str(random.randrange(60)))
    for block_id in chain:
        if (found := spill.get(block_id)) is not None:
            if bytes(found["keys"].data) != make_block(block_id, floats=FLOATS).tensors["keys"].data:
                sys.exit("a wrong read")
        elif not spill.contains(block_id.key):
            spill.put(make_block(block_id, floats=FLOATS))
    spill.touch([block_id.key for block_id in chain])
    if time.monotonic() - said_at > 0.03:
        said_at = time.monotonic()
        print(spill.settled_bytes(), spill.counters()["cold_hits"], flush=True)
"""


class Child:
    """A process whose lines are read without waiting."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.rest = b""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    def lines(self) -> list[bytes]:
        assert self.process.stdout is not None
        *lines, self.rest = (self.rest + (self.process.stdout.read() or b"")).split(b"\n")
        return lines


class Play:
    """The supervisor's part."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.credits = Credits(LIMITS)
        self.writers: dict[str, Child] = {}
        self.count = self.hits = self.deleted = 0
        self.asked = False
        held, self.orders = os.pipe()
        command = [sys.executable, "-P", "-m", "cachestore.evict", "--root", str(root), "--max-bytes", str(LIMITS.high_bytes)]
        command += ["--min-free-bytes", "0", "--interval", "5", "--lifeline-fd", str(held)]
        self.janitor = Child(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[held]))
        os.close(held)

    def start(self) -> None:
        self.count += 1
        name = f"w{self.count}"
        self.credits.open(name)
        command = [sys.executable, "-c", WRITER, str(self.root), str(self.credits.top_up(name))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        self.writers[name] = Child(process)

    def kill(self, name: str) -> None:
        child = self.writers.pop(name)
        child.process.kill()
        child.process.communicate()
        self.credits.died(name, time.monotonic())

    def turn(self) -> None:
        for name, child in self.writers.items():
            assert child.process.poll() is None, "a writer ended by itself: a wrong read"
            for line in child.lines():
                settled, hits = map(int, line.split())
                self.credits.settled(name, settled, time.monotonic())
                self.hits = max(self.hits, hits)
            if more := self.credits.top_up(name):
                assert child.process.stdin is not None
                child.process.stdin.write(b"%d\n" % more)
                child.process.stdin.flush()
        for line in self.janitor.lines():
            said = json.loads(line)
            self.deleted += said["deleted_bytes"]
            self.asked = self.asked and said["id"] is None
            self.credits.looked(Look(said["began"], said["left_bytes"] if said["state"] == "ok" else None, said["free_bytes"]))
        if self.credits.needs_a_look and not self.asked:
            self.asked = True
            os.write(self.orders, b'{"do": "pass", "id": 1}\n')

    def end(self) -> None:
        for name in list(self.writers):
            self.kill(name)
        os.close(self.orders)
        self.janitor.process.communicate(timeout=patient_s(10))


def test_the_cap_holds_at_every_sample_through_twenty_kills_and_nothing_wrong_is_read(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    samples: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.004):
            samples.append(used_bytes(root))

    watcher = threading.Thread(target=watch)
    play = Play(root)
    try:
        watcher.start()
        for _ in range(WRITERS):
            play.start()
        kills, began = 0, time.monotonic()
        next_kill = began + 1.5
        while kills < KILLS or not (play.deleted and play.hits):
            assert time.monotonic() < began + patient_s(MOST_S / 2), (kills, play.deleted, play.hits)
            play.turn()
            if kills < KILLS and time.monotonic() > next_kill:
                play.kill(random.choice(list(play.writers)))
                play.start()
                kills += 1
                next_kill = time.monotonic() + random.uniform(0.2, 0.8)
            time.sleep(0.005)
    finally:
        over.set()
        watcher.join()
        play.end()
    assert len(samples) > 200
    assert CAP // 2 < max(samples) <= CAP, max(samples)

    for temporary in root.rglob("*.tmp"):
        os.utime(temporary, (then := time.time() - 601, then))
    run_pass(root, Policy(LIMITS.high_bytes, 0))
    assert {path.suffix for path in (root / "v1").rglob("*") if path.is_file()} <= {".safetensors", ".json"}
    assert [report.bad for report in verify(root)] == [[]]
