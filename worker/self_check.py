"""Whether a model runs as fast as this machine can: what was measured, judged by arithmetic, and why not. Pure.

A token cannot take less than reading all weights once, a prompt not less than its multiplications; a multiple of that, beyond
what small models spend on overhead, is a slow path.
"""

from dataclasses import dataclass

SLOW_RATIO = 8.0
"""Of what a step takes to what it must take. Good ones were seen up to 3 on a machine with other work."""
OVERHEAD_S = 0.05
"""Of a step, whatever the model's size; twice the worst seen for a tiny model on a busy machine."""
SLOW_KERNEL_RATIO = 3.0
"""float32 products are 8 to 50 times as fast as half-precision ones on a CPU, and 40 to 1000 times as quantized ones."""
FAST_BLAS_FLOPS = 15e9
"""Of float32 products. Reference BLAS makes 5 GFLOP/s, OpenBLAS 40 and more."""
FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model is and what it runs on."""

    weights: str
    """`float32`, `float16`, `4-bit`, …"""
    weights_bytes: int
    parameters: int
    on_cpu: bool
    wants_metal: bool = False
    """This is a Mac, where only Metal is fast."""
    lacks_openblas: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """None where measuring would have taken too long, or makes no sense on the device."""

    bandwidth_bytes_per_s: float
    float32_flops: float | None = None
    """Per second, of a small float32 product."""
    own_flops: float | None = None
    """Of the same product with weights kept as the model's are."""
    decode_s: float | None = None
    """Per token."""
    prefill_s: float | None = None
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    slow_because: str | None
    decode_ratio: float | None
    """Of what a token takes to what reading the weights takes."""
    prefill_ratio: float | None
    """Of what a chunk takes to what its float32 products would."""


def judge(facts: Facts, measured: Measured) -> Verdict:
    floor_s = facts.weights_bytes / measured.bandwidth_bytes_per_s
    decode_ratio = None if measured.decode_s is None else measured.decode_s / floor_s
    prefill_ratio = None
    if measured.prefill_s is not None and measured.float32_flops is not None and measured.prefill_tokens:
        prefill_ratio = measured.prefill_s * measured.float32_flops / (2 * facts.parameters * measured.prefill_tokens)
    because = _known_reason(facts, measured) or _unknown_reason(measured, floor_s)
    return Verdict(because, decode_ratio, prefill_ratio)


def _known_reason(facts: Facts, measured: Measured) -> str | None:
    if not facts.on_cpu:
        return None
    if facts.wants_metal:
        return "MLX found no Metal device and computes on the CPU"
    fast, own = measured.float32_flops, measured.own_flops
    if facts.lacks_openblas and fast is not None and fast < FAST_BLAS_FLOPS:
        return (
            f"OpenBLAS is not installed, so that products run at {_giga(fast)} GFLOP/s, where it makes 40 and more "
            "(Debian, Ubuntu: sudo apt install libopenblas0-pthread)"
        )
    if facts.weights != FLOAT32 and fast is not None and own is not None and own * SLOW_KERNEL_RATIO < fast:
        return (
            f"its weights are {facts.weights}, for which MLX has no fast kernels on the CPU: products run at {_giga(own)} "
            f"GFLOP/s, float32 ones at {_giga(fast)}; a float32 copy of the model would be faster"
        )
    return None


def _unknown_reason(measured: Measured, floor_s: float) -> str | None:
    took_s = measured.decode_s
    if took_s is None or took_s < SLOW_RATIO * floor_s + OVERHEAD_S:
        return None
    return (
        f"a token takes {took_s * 1000:.0f} ms, where reading the weights takes {floor_s * 1000:.1f} ms, and nothing is known "
        "that would explain it; the machine may be busy"
    )


def _giga(value: float) -> str:
    return f"{value / 1e9:.2g}"
