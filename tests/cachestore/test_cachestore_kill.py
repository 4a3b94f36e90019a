"""Several workers write one chain at once and are killed wherever they happen to be."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from cachestore.store import Store
from cachestore.sweep import Policy, run_pass
from tests.cachestore.cachestore_stand import files_below, make_block, make_chain, make_namespace

WRITERS = 3
ROUNDS = 8
WRITER = """
import random, sys
from pathlib import Path
from tests.cachestore.cachestore_stand import make_block, make_chain, make_namespace
from cachestore.store import Store
from cachestore.writer import Writer

writer = Writer(Store(Path(sys.argv[1]), make_namespace()), 64 << 20)
print("up", flush=True)
while True:
    for block_id in random.sample(make_chain(40), 40):
        writer.submit(make_block(block_id, floats=20_000))
    writer.flush(10)
    found = sorted(Path(sys.argv[1]).rglob("*.safetensors"))
    for path in random.sample(found, len(found) // 2):
        path.unlink(missing_ok=True)
"""


def start(root: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


def test_killed_writers_leave_no_wrong_block_and_nothing_the_janitor_does_not_clean(root: Path) -> None:
    chain = make_chain(40)
    store = Store(root, make_namespace())
    children = [start(root) for _ in range(WRITERS)]
    read = 0
    try:
        for round_number in range(ROUNDS):
            until = time.monotonic() + random.uniform(0.02, 0.2)
            while time.monotonic() < until or not read:
                block_id = random.choice(chain)
                found = store.get(block_id)
                read += found is not None
                assert found is None or bytes(found["keys"].data) == make_block(block_id, floats=20_000).tensors["keys"].data
            victim = round_number % WRITERS
            children[victim].kill()
            children[victim].wait()
            if round_number < ROUNDS - WRITERS:
                children[victim] = start(root)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert store.counters().bad == {}
    assert store.put(make_block(chain[0], floats=20_000)) or store.contains(chain[0].key)

    for temporary in files_below(root, "*.tmp"):
        os.utime(temporary, (then := time.time() - 601, then))
    run_pass(root, Policy(max_bytes=1 << 40, min_free_bytes=0))
    kinds = {path.suffix for path in files_below(root / "v1")}
    assert kinds <= {".safetensors", ".json"}
