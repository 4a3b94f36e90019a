"""The verdict on a model's speed, on numbers: those of machines that were measured, and edges."""

import time
from dataclasses import replace

import pytest

from worker.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from worker import speed_probe  # noqa: E402
from worker.self_check import Facts, Measured, judge  # noqa: E402

GB = 10**9
LAPTOP = Facts(weights="float32", weights_bytes=540_000_000, parameters=135_000_000, on_cpu=True)
GOOD = Measured(9 * GB, float32_flops=42e9, own_flops=41e9, decode_s=0.065, prefill_s=0.2, prefill_tokens=32)


def test_float32_with_openblas_is_what_a_cpu_can_do() -> None:
    verdict = judge(LAPTOP, GOOD)
    assert verdict.slow_because is None
    assert verdict.decode_ratio == pytest.approx(0.065 / 0.06)
    assert verdict.prefill_ratio == pytest.approx(0.2 * 42e9 / (2 * 135e6 * 32))


@pytest.mark.parametrize(
    ("weights", "own_flops"), [("float16", 4.3e9), ("bfloat16", 5.5e9), ("4-bit", 0.96e9), ("4-bit", 0.02e9)]
)
def test_half_precision_and_quantized_weights_on_a_cpu_are_named_with_both_rates(weights: str, own_flops: float) -> None:
    said = judge(replace(LAPTOP, weights=weights), replace(GOOD, own_flops=own_flops, decode_s=None)).slow_because
    assert said is not None and weights in said and f"{own_flops / 1e9:.2g} GFLOP/s" in said and "42" in said


def test_kernels_that_keep_up_are_no_slow_path_whatever_they_compute() -> None:
    assert judge(replace(LAPTOP, weights="bfloat16"), replace(GOOD, own_flops=30e9)).slow_because is None
    on_gpu = replace(LAPTOP, weights="4-bit", on_cpu=False)
    assert judge(on_gpu, replace(GOOD, float32_flops=None, own_flops=None)).slow_because is None


def test_a_missing_openblas_is_named_only_where_it_costs_something() -> None:
    lacking = replace(LAPTOP, lacks_openblas=True)
    assert "OpenBLAS" in str(judge(lacking, replace(GOOD, float32_flops=5e9, own_flops=5e9)).slow_because)
    assert judge(lacking, GOOD).slow_because is None


def test_a_mac_without_metal_is_slow_however_well_its_cpu_does() -> None:
    assert "Metal" in str(judge(replace(LAPTOP, wants_metal=True), GOOD).slow_because)
    assert judge(replace(LAPTOP, wants_metal=True, on_cpu=False), GOOD).slow_because is None


def test_a_token_that_takes_many_times_what_reading_the_weights_does_is_slow_without_a_reason() -> None:
    said = judge(LAPTOP, replace(GOOD, decode_s=0.6)).slow_because
    assert said is not None and "600 ms" in said and "60.0 ms" in said
    assert judge(LAPTOP, replace(GOOD, decode_s=0.5)).slow_because is None


def test_overhead_is_all_that_a_tiny_model_takes() -> None:
    tiny = replace(LAPTOP, weights_bytes=600_000, parameters=150_000)
    assert judge(tiny, replace(GOOD, decode_s=0.02)).slow_because is None
    assert "200 ms" in str(judge(tiny, replace(GOOD, decode_s=0.2)).slow_because)


def test_what_was_not_measured_is_not_judged() -> None:
    verdict = judge(LAPTOP, Measured(9 * GB))
    assert (verdict.slow_because, verdict.decode_ratio, verdict.prefill_ratio) == (None, None, None)


def test_a_machine_that_is_busy_for_a_moment_is_not_taken_for_a_slow_one() -> None:
    stalls_s = iter([0.5, 0.5])

    def work() -> mx.array:
        time.sleep(next(stalls_s, 0.0))
        return mx.zeros(1)

    assert speed_probe._best(work) < 0.5
