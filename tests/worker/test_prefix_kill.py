"""SIGKILL in the middle of a prefill: the successor starts from what was finished, and answers the same."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from supervisor.protocol import CacheGrant
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import REPO, tiny_model
from tests.stands.patience import patient_s
from tests.stands.sink import ForcedText, RunningEngine

PROMPT = random.Random(3).choices(range(10, 400), k=1900)

VICTIM = """
import json, sys, time
from pathlib import Path
from supervisor.protocol import CacheGrant
from tests.stands.sink import ForcedText, RunningEngine
cache = CacheGrant(dir=sys.argv[2], hot_bytes=1 << 26, block=16)
with RunningEngine(Path(sys.argv[1]), cache=cache, text=ForcedText()) as e:
    from worker.lanes import Lane
    prefill, begun = Lane.prefill, []
    def hangs(lane, tokens):
        begun.append(tokens)
        if len(begun) > 4:  # until it is killed
            time.sleep(600)
        return prefill(lane, tokens)
    Lane.prefill = hangs
    e.submit("a", json.load(sys.stdin), 5)
    print("running", flush=True)
    time.sleep(600)
"""


def test_a_killed_prefill_is_continued_by_the_successor(tmp_path: Path) -> None:
    model, store = tiny_model(tmp_path / "tiny"), tmp_path / "store"
    command = [sys.executable, "-c", VICTIM, str(model), str(store)]
    victim = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert victim.stdin is not None
    assert victim.stdout is not None
    try:
        victim.stdin.write(json.dumps(PROMPT))
        victim.stdin.close()
        assert victim.stdout.readline() == "running\n"
        until = time.monotonic() + patient_s(30)
        while len(list(store.rglob("*.safetensors"))) < 40 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(10) == -signal.SIGKILL
        victim.stdout.close()
    with RunningEngine(model, cache=CacheGrant(dir=str(store), hot_bytes=1 << 26, block=16), text=ForcedText()) as e:
        answer = e.ask("b", PROMPT, 16)
    assert answer.usage is not None
    assert 16 * 32 <= answer.usage.cached_cold < 1888, "killed in the middle"
    assert_same_greedy(model, PROMPT, greedy_ids(model, PROMPT, 16), answer.ids)
