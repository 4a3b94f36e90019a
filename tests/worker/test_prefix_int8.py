"""Blocks at eight bits, through a whole engine: as much is restored, less is on disk, and they never mix with exact ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from supervisor.protocol import CacheGrant
from tests.stands.families import family_model
from tests.stands.models import tiny_model
from tests.stands.sink import ForcedText, RunningEngine

BLOCK = 16
LENGTH = 300


def prompt(seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=LENGTH)


def running(model: Path, store: Path, dtype: str) -> RunningEngine:
    cache = CacheGrant(dir=str(store), hot_bytes=64 << 20, block=BLOCK, dtype=dtype)
    return RunningEngine(model, cache=cache, text=ForcedText())


def stored_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in store.rglob("*.safetensors"))


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_next", "deepseek_v32"])
def test_a_new_process_restores_as_much_as_from_exact_blocks(tmp_path: Path, arch: str) -> None:
    model = family_model(tmp_path / "tiny", arch)
    cached: dict[str, int] = {}
    for dtype in ("native", "int8"):
        with running(model, tmp_path / dtype, dtype) as e:
            cold = e.ask("cold", prompt(), 4)
            hot = e.ask("hot", prompt(), 4)
        with running(model, tmp_path / dtype, dtype) as e:
            restored = e.ask("restored", prompt(), 4)
        assert cold.cached == 0
        assert hot.ids == cold.ids, "RAM keeps what was computed"
        assert restored.finish == "length"
        assert restored.usage is not None and restored.usage.cached_hot == 0
        cached[dtype] = restored.usage.cached_cold
    assert cached["int8"] == cached["native"] > 0
    assert stored_bytes(tmp_path / "int8") < 0.9 * stored_bytes(tmp_path / "native")


def test_neither_kind_is_found_by_the_other(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    cached = []
    for dtype in ("native", "int8", "int8", "native"):
        with running(model, tmp_path / "store", dtype) as e:
            cached.append(e.ask("a", prompt(), 2).cached)
    assert cached == [0, 0, 288, 288]
