"""What the prefix cache of the worker's own engine costs and saves, in this process, without a server around it.

A capture's CPU is that of the whole process meanwhile, as MLX copies on a thread of its own; so what a write spends at the same
time counts twice. A write's CPU is that of the thread that writes.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.gates import Gate, percent, ratio
from benchmarks.prompts import Prompts
from cachestore.store import Store
from supervisor.protocol import CacheGrant, Grant, Timings
from tests.stands.models import smollm2_dir
from tests.stands.sink import RunningEngine
from worker.blas import load_openblas
from worker.prefix import PrefixCache
from worker.text import Text

RESTORED_TOKENS = 2048
PROMPT_TOKENS = RESTORED_TOKENS + 17
HOT_BYTES = 1 << 30
ANSWER_S, WRITTEN_S = 300.0, 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt."""

    prefill_s: float
    from_ssd_s: float
    from_ram_s: float
    cold_cpu_s: float
    capture_cpu_s: float
    write_cpu_s: float
    disk_bytes: int
    kv_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    args = parser.parse_args()
    load_openblas()
    kept = list(gates(measure((args.model or smollm2_dir()).resolve(), args.repeats)))
    print(f"the engine alone, {PROMPT_TOKENS} tokens, medians of {args.repeats}", *[gate.line() for gate in kept], sep="\n")
    return 0 if all(gate.holds for gate in kept) else 1


def gates(runs: list[Measured]) -> Iterator[Gate]:
    prefill = [x.prefill_s for x in runs]
    yield Gate(
        f"restore {RESTORED_TOKENS} tokens from SSD / cold prefill", percent((x.from_ssd_s for x in runs), prefill), 3, " %"
    )
    yield Gate("the same from RAM", percent((x.from_ram_s for x in runs), prefill), 2, " %")
    kept_s = (x.capture_cpu_s + x.write_cpu_s for x in runs)
    yield Gate("CPU of capturing and writing / of the cold prompt", percent(kept_s, (x.cold_cpu_s for x in runs)), 5, " %")
    yield Gate("bytes on disk / bytes of KV", ratio((x.disk_bytes for x in runs), (x.kv_bytes for x in runs)), 1.02)


def measure(model: Path, repeats: int) -> list[Measured]:
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as cache, clocked() as clocks:
        engine = RunningEngine(model, cache=CacheGrant(dir=cache, hot_bytes=0))
        with engine:
            bench = Bench(engine, model, Path(cache), clocks)
            return [bench.measure(f"{repeat + 1}/{repeats}") for repeat in range(repeats)]


# CPU


@dataclass(slots=True)
class Clocks:
    """CPU seconds so far."""

    capture_s: float = 0.0
    write_s: float = 0.0


@contextlib.contextmanager
def clocked() -> Iterator[Clocks]:
    """Every capture and every write on the clock."""
    clocks = Clocks()
    capture, put = PrefixCache.capture, Store.put

    def timed_capture(*args: object) -> None:
        with _clock(time.process_time) as spent_s:
            capture(*args)  # type: ignore[arg-type]
        clocks.capture_s += spent_s()

    def timed_put(*args: object) -> bool:
        with _clock(time.thread_time) as spent_s:
            done = put(*args)  # type: ignore[arg-type]
        clocks.write_s += spent_s()
        return done

    with patch.object(PrefixCache, "capture", timed_capture), patch.object(Store, "put", timed_put):
        yield clocks


@contextlib.contextmanager
def _clock(now: Callable[[], float]) -> Iterator[Callable[[], float]]:
    begun = now()
    ended: list[float] = []
    yield lambda: ended[0] - begun
    ended.append(now())


# The engine


class Bench:
    def __init__(self, engine: RunningEngine, model: Path, cache: Path, clocks: Clocks) -> None:
        self._engine = engine
        self._text = Text.open(model)
        self._prompts = Prompts(model, seed=1)
        self._cache = cache
        self._clocks = clocks
        self._asked = 0

    def measure(self, at: str) -> Measured:
        prompt = self._text.encode_text(self._prompts.fresh(PROMPT_TOKENS + 64))[:PROMPT_TOKENS]
        say(f"{at} engine: {PROMPT_TOKENS} tokens, cold")
        files, capture_s, write_s, cpu_s = self._files(), self._clocks.capture_s, self._clocks.write_s, time.process_time()
        cold = self._ask(prompt)
        cold_cpu_s = time.process_time() - cpu_s
        written = self._written_since(files)
        capture_s, write_s = self._clocks.capture_s - capture_s, self._clocks.write_s - write_s
        say(f"{at} engine: from SSD, from RAM")
        from_ssd = self._ask(prompt, cold=True)
        self._engine.engine.grant(Grant(hot_bytes=HOT_BYTES))
        self._ask(prompt, cold=True)
        from_ram = self._ask(prompt, hot=True)
        self._engine.engine.grant(Grant(hot_bytes=0))
        info = self._engine.sink.info
        assert info is not None
        return Measured(
            prefill_s=cold.prefill_s,
            from_ssd_s=from_ssd.restore_s,
            from_ram_s=from_ram.restore_s,
            cold_cpu_s=cold_cpu_s,
            capture_cpu_s=capture_s,
            write_cpu_s=write_s,
            disk_bytes=sum(file.stat().st_size for file in written),
            kv_bytes=RESTORED_TOKENS * info.kv_bytes_per_token,
        )

    def _ask(self, prompt: list[int], *, cold: bool = False, hot: bool = False) -> Timings:
        """`cold` and `hot`: where its blocks have to come from."""
        self._asked += 1
        answer = self._engine.submit(f"r{self._asked}", prompt, 1)
        assert answer.over.wait(ANSWER_S), answer
        assert answer.usage is not None and answer.timings is not None
        expected = (RESTORED_TOKENS if cold else 0, len(prompt) - 1 if hot else 0)
        assert (answer.usage.cached_cold, answer.usage.cached_hot) == expected, answer.usage
        return answer.timings

    def _files(self) -> set[Path]:
        return set(self._cache.rglob("*.safetensors"))

    def _written_since(self, before: set[Path]) -> set[Path]:
        """The files of one prompt's blocks, once they are all there."""
        until = time.monotonic() + WRITTEN_S
        assert self._engine.sink.info is not None
        blocks = RESTORED_TOKENS // int(str(self._engine.sink.info.capabilities["cache_block_tokens"]))
        while len(new := self._files() - before) < blocks:
            assert time.monotonic() < until, f"{len(new)} of {blocks} blocks were written within {WRITTEN_S:.0f} s"
            time.sleep(0.02)
        return new


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
