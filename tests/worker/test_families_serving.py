"""Every cache family as an engine serves it: in company, coming and going, and after a new start."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.families import FAMILIES, UNCACHED, family_model
from tests.stands.models import REPO
from tests.stands.patience import patient_s
from tests.stands.sink import Answer, ForcedText, RunningEngine

BLOCK = 16


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=length)


def running(model: Path, store: Path | None) -> RunningEngine:
    grant = CacheGrant(dir=None if store is None else str(store), hot_bytes=64 << 20, block=BLOCK)
    return RunningEngine(model, cache=grant, text=ForcedText())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {family: family_model(home / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_that_come_and_go_each_get_their_own_answer(models: dict[str, Path], family: str) -> None:
    """Restored lengths from nothing to past every window, two of them cancelled while the others decode."""
    model = models[family]
    beginnings = [prompt(length, seed=length) for length in (20, 70, 130)]
    prompts = [[*beginnings[i % 3], *prompt(3 + 9 * i, seed=100 + i)] for i in range(8)]
    with running(model, None) as e:
        for i, beginning in enumerate(beginnings):  # longer by one than a block boundary that is to be found again
            e.ask(f"before{i}", beginning[: len(beginning) // BLOCK * BLOCK + 1], 2)
        answers: list[Answer] = []
        for i, tokens in enumerate(prompts):
            answers.append(e.submit(f"r{i}", tokens, 1000 if i in (3, 5) else 30 if i % 2 else 18))
            _wait_for(answers[max(0, i - 3)], 4)
            if i in (4, 6):
                _wait_for(answers[i - 1], 2)
                e.engine.cancel(f"r{i - 1}")
        assert all(answer.over.wait(60) for answer in answers)
        widest = max(len(step) for step in e.sink.steps)
        for i in (1, 3, 7):  # what was copied out of the full batch serves the next turn
            longer = [*prompts[i], *answers[i].ids, *prompt(5, seed=200 + i)]
            later = e.ask(f"later{i}", longer, 12)
            assert later.cached == (len(prompts[i]) + len(answers[i].ids)) // BLOCK * BLOCK
            assert_same_greedy(model, longer, greedy_ids(model, longer, 12), later.ids)
    assert widest >= 3 or family == "llama4", "nothing was batched"
    assert [answer.cached for answer in answers] == [len(beginnings[i % 3]) // BLOCK * BLOCK for i in range(8)]
    assert [answers[i].finish for i in (3, 5)] == ["cancelled", "cancelled"]
    for tokens, answer in zip(prompts, answers, strict=True):
        expected = greedy_ids(model, tokens, max(1, len(answer.ids)))
        assert_same_greedy(model, tokens, expected[: len(answer.ids)], answer.ids)


def _wait_for(answer: Answer, rows: int) -> None:
    until = time.monotonic() + patient_s(30)
    while len(answer.rows) < rows and not answer.over.is_set():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("family", UNCACHED)
def test_a_model_whose_cache_cannot_be_taken_apart_is_served_and_says_why(tmp_path: Path, family: str) -> None:
    model = family_model(tmp_path / family, family)
    prompts = [prompt(length, seed=length) for length in (150, 30, 61)]
    with running(model, tmp_path / "store") as e:
        answers = [e.submit(f"r{i}", tokens, 8) for i, tokens in enumerate(prompts)]
        assert all(answer.over.wait(60) for answer in answers)
        again = e.ask("again", prompts[0], 8)
        assert e.sink.info is not None
        said = e.sink.info.capabilities
    assert "LayerCache" in str(said["cache_off_because"])
    assert "LayerCache" in str(said["one_at_a_time_because"])
    assert (said["cache"], e.sink.info.cache_namespace, again.cached) == (False, None, 0)
    for tokens, answer in zip([*prompts, prompts[0]], [*answers, again], strict=True):
        assert_same_greedy(model, tokens, greedy_ids(model, tokens, 8), answer.ids)


def test_a_model_that_cannot_batch_says_so(models: dict[str, Path]) -> None:
    with running(models["llama4"], None) as e:
        assert e.sink.info is not None
        assert "ChunkedKVCache" in str(e.sink.info.capabilities["one_at_a_time_because"])
        assert e.sink.info.capabilities["cache"] is True
    with running(models["mamba2"], None) as e:
        assert e.sink.info is not None
        assert e.sink.info.capabilities["one_at_a_time_because"] is None


EARLIER_PROCESS = """
import json, os, sys
from pathlib import Path
from tests.worker.test_families_serving import prompt, running
out = {}
for family, model in json.loads(sys.argv[1]).items():
    with running(Path(model), Path(sys.argv[2])) as e:
        out[family] = e.ask("a", prompt(150), 40).ids
print(json.dumps(out), flush=True)
os._exit(0)  # as a worker ends: MLX may abort a process in which the engine's thread is swept away by the interpreter's end
"""


def test_a_new_process_goes_on_where_an_earlier_one_was_in_the_conversation(models: dict[str, Path], tmp_path: Path) -> None:
    arguments = [json.dumps({family: str(path) for family, path in models.items()}), str(tmp_path / "store")]
    command = [sys.executable, "-c", EARLIER_PROCESS, *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    for family, first in json.loads(done.stdout.splitlines()[-1]).items():
        longer = [*prompt(150), *first, *prompt(11, seed=2)]
        with running(models[family], tmp_path / "store") as e:
            again = e.ask("again", prompt(150), 40)
            second = e.ask("second", longer, 16)
        assert again.usage is not None
        assert (again.usage.cached_hot, again.usage.cached_cold) == (0, 144), family
        assert again.ids == first, family
        assert second.cached == 176, family
        assert_same_greedy(models[family], longer, greedy_ids(models[family], longer, 16), second.ids)
