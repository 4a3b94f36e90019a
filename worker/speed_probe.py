"""Measures what `worker.self_check` judges: the machine with arrays of its own, the model with steps of a lane of its own.

On the engine thread, after the warm-up. Each part is left out where it would take longer than anybody wants to wait for it.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx

from worker.blas import load_openblas
from worker.lane_set import AnyLane
from worker.loader import LoadedModel
from worker.mlx_types import evaluate
from worker.sampling import greedy
from worker.self_check import FLOAT32, Facts, Measured

SIDE = 4096
"""Of the float32 matrix that is read for the bandwidth: 64 MiB, as 16 MiB came out of a server's cache at 34 GB/s, not 5."""
ROWS, WIDTH = 8, 512
"""Of the product: 4 MFLOP, 0.1 s by the slowest kernel seen (4-bit weights beside float16 on a CPU)."""
LEAST_REPEATS, MOST_REPEATS, ENOUGH_S = 3, 40, 0.06
"""Where other programs have the cores, most products wait for one of BLAS's threads, and one may wait for very long."""
PREFILL_TOKENS, DECODE_STEPS = 32, 3
MOST_S = 0.12
"""For either: as many tokens are timed as fit, by the rates just measured, and none where not even one does."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How most of a model's weights are kept."""

    dtype: mx.Dtype
    bits: int | None
    """None: they are not quantized."""
    group_size: int
    parameters: int

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("mlx.core.") if self.bits is None else f"{self.bits}-bit"


def weights_of(model: LoadedModel, config: Mapping[str, object]) -> Weights:
    arrays = list(_named_arrays(model.model.parameters()))
    scales = [array for name, array in arrays if name == "scales"]
    table = cast("Mapping[str, object]", config.get("quantization") or {})
    bits, group_size = (value if isinstance(value := table.get(key), int) else None for key in ("bits", "group_size"))
    bits = (bits or 4) if scales else None
    packed = 32 // bits if bits else 1
    parameters = sum(array.size * (packed if array.dtype == mx.uint32 else 1) for _, array in arrays)
    largest = max((array for _, array in arrays), key=lambda array: array.nbytes)
    return Weights(scales[0].dtype if scales else largest.dtype, bits, group_size or 64, parameters)


def facts_of(model: LoadedModel, weights: Weights) -> Facts:
    on_cpu = mx.default_device() == mx.Device(mx.DeviceType.cpu)
    return Facts(
        weights=weights.name,
        weights_bytes=model.weights_bytes,
        parameters=weights.parameters,
        on_cpu=on_cpu,
        wants_metal=sys.platform == "darwin",
        lacks_openblas=on_cpu and sys.platform == "linux" and load_openblas() is None,
    )


def measure(facts: Facts, weights: Weights, lane: AnyLane, model: LoadedModel) -> Measured:
    """The lane is new, and is closed."""
    bandwidth = _bandwidth()
    fast = _flops(None) if facts.on_cpu else None
    own = _flops(weights) if facts.on_cpu and weights.name != FLOAT32 else fast
    token_s = max(facts.weights_bytes / bandwidth, 2 * facts.parameters / own if own else 0.0)
    decode_steps = min(DECODE_STEPS, round(MOST_S / token_s))
    prefill_tokens = min(PREFILL_TOKENS, int(MOST_S * own / (2 * facts.parameters))) if own else PREFILL_TOKENS
    steps = _steps(lane, model, max(1, prefill_tokens), decode_steps) if decode_steps else (None, None, 0)
    lane.close()
    mx.clear_cache()
    return Measured(bandwidth, fast, own, *steps)


def _bandwidth() -> float:
    """Bytes per second of a product with a vector, which is what decoding does."""
    matrix, vector = mx.ones((SIDE, SIDE)), mx.ones((SIDE, 1))
    evaluate([matrix, vector])
    return matrix.nbytes / _best(partial(mx.matmul, matrix, vector))


def _flops(weights: Weights | None) -> float:
    """Per second; None stands for float32."""
    dtype = mx.float32 if weights is None else weights.dtype
    rows, square = mx.ones((ROWS, WIDTH), dtype=dtype), mx.ones((WIDTH, WIDTH), dtype=dtype)
    evaluate([rows, square])
    work = partial(mx.matmul, rows, square.T)
    if weights is not None and weights.bits is not None:
        packed, scales, biases = mx.quantize(square, group_size=weights.group_size, bits=weights.bits)
        evaluate([packed, scales, biases])
        work = partial(mx.quantized_matmul, rows, packed, scales, biases, group_size=weights.group_size, bits=weights.bits)
    return 2 * ROWS * WIDTH * WIDTH / _best(work)


def _best(work: Callable[[], mx.array]) -> float:
    """Seconds of the quickest of a few, or of many that are quick."""
    took: list[float] = []
    while len(took) < LEAST_REPEATS or (len(took) < MOST_REPEATS and sum(took) < ENOUGH_S):
        began_at = time.perf_counter()
        evaluate([work()])
        took.append(time.perf_counter() - began_at)
    return min(took)


def _steps(lane: AnyLane, model: LoadedModel, tokens: int, decode_steps: int) -> tuple[float, float | None, int]:
    """Seconds per decoded token, seconds of a chunk of the prompt and its length."""
    uid = lane.insert([0] * (tokens + 1), 0, model.new_cache(), greedy, [])
    began_at = time.perf_counter()
    lane.step()
    prefill_s = time.perf_counter() - began_at
    held = sum(row.tokens for row in lane.held())
    while not lane.step():
        pass
    took: list[float] = []
    for _ in range(decode_steps):
        began_at = time.perf_counter()
        lane.step()
        took.append(time.perf_counter() - began_at)
    lane.remove([uid])
    return min(took), prefill_s if held > 1 else None, held


def _named_arrays(tree: object, name: str = "") -> list[tuple[str, mx.array]]:
    if isinstance(tree, mx.array):
        return [(name, tree)]
    if isinstance(tree, Mapping):
        return [found for key, branch in cast("Mapping[str, object]", tree).items() for found in _named_arrays(branch, key)]
    if isinstance(tree, list | tuple):
        return [found for branch in cast("list[object]", tree) for found in _named_arrays(branch, name)]
    return []
