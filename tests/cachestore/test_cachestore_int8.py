"""Blocks at eight bits: half the size, close to what they were, and nothing but rows is touched."""

from pathlib import Path

import numpy as np
import pytest

from cachestore import int8
from cachestore.block import BadBlock, Block, BlockId, Tensor
from cachestore.store import Namespace, Store

SHAPE = (4, 1, 3, 16, 64)


def bf16(numbers: np.ndarray) -> bytes:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def tensor(dtype: str, shape: tuple[int, ...] = SHAPE, scale: float = 3.0) -> Tensor:
    numbers = (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)
    data = bf16(numbers) if dtype == "BF16" else numbers.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()
    return Tensor(dtype, shape, data)


def numbers(t: Tensor) -> np.ndarray:
    if t.dtype == "BF16":
        return (np.frombuffer(t.data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(t.shape)
    return np.frombuffer(t.data, {"F32": np.float32, "F16": np.float16}[t.dtype]).astype(np.float32).reshape(t.shape)


def size(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("width", [16, 64, 80, 128])
def test_no_number_is_off_by_more_than_half_a_step_of_its_run(dtype: str, width: int) -> None:
    before = tensor(dtype, (2, 1, 3, 8, width))
    after = int8.unpack(int8.pack({"kv0": before}))["kv0"]
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    run = 64 if width % 64 == 0 else width
    runs = np.abs(numbers(before)).reshape(2, 1, 3, 8, -1, run)
    allowed = (
        np.repeat(runs.max(axis=-1) / 127 * 0.51, run, axis=-1) + np.abs(numbers(before)) * 2**-8 * (dtype != "F32") + 1e-3
    )
    assert (np.abs(numbers(after) - numbers(before)) <= allowed).all()


def test_bf16_takes_0_53_of_its_bytes() -> None:
    before = {"kv0": tensor("BF16")}
    assert size(int8.pack(before)) / size(before) == pytest.approx(0.53, abs=0.005)


def test_an_outlier_costs_precision_only_in_its_own_run() -> None:
    shape = (1, 1, 1, 2, 128)
    values = np.full(shape, 0.5, np.float32)
    values[..., 0, 0] = 1000.0
    after = numbers(int8.unpack(int8.pack({"kv0": Tensor("F32", shape, values.tobytes())}))["kv0"])
    assert (np.abs(after - values)[..., 0, 64:] < 0.01).all() and (np.abs(after - values)[..., 1, :] < 0.01).all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_kept_as_it_is() -> None:
    zeros = Tensor("F32", SHAPE, bytes(4 * int(np.prod(SHAPE))))
    assert int8.unpack(int8.pack({"kv0": zeros}))["kv0"] == zeros
    odd = np.zeros(SHAPE, np.float32)
    odd[0, 0, 0, 0, 0] = np.inf
    infinite = Tensor("F32", SHAPE, odd.tobytes())
    assert int8.pack({"kv0": infinite}) == {"kv0": infinite}


def test_recurrent_state_and_rows_that_are_packed_already_are_left_alone() -> None:
    state = {"state0": tensor("F32", (2, 1, 3, 3))}
    assert int8.pack(state) == state
    quantized = {"kv0": Tensor("U32", (1, 1, 1, 2, 2), bytes(16)), "kv1": tensor("F16", (1, 1, 1, 2, 2))}
    assert int8.pack(quantized) == quantized
    mixed = {"kv0": tensor("F32"), **state}
    assert int8.unpack(int8.pack(mixed))["state0"] == state["state0"]


@pytest.mark.parametrize("damage", ["no scale", "short scale", "dtype", "unknown"])
def test_what_cannot_be_unpacked_is_a_bad_block(damage: str) -> None:
    packed = int8.pack({"kv0": tensor("F32")})
    match damage:
        case "no scale":
            del packed["kv0.scale"]
        case "short scale":
            packed["kv0.scale"] = Tensor("F32", (1,), bytes(4))
        case "dtype":
            packed["kv0.i8.F32"] = Tensor("U8", SHAPE, bytes(int(np.prod(SHAPE))))
        case _:
            packed["kv0.i8.F99"] = packed.pop("kv0.i8.F32")
    with pytest.raises(BadBlock):
        int8.unpack(packed)


def test_a_store_of_int8_gives_back_what_it_was_given_up_to_rounding(tmp_path: Path) -> None:
    block = Block(BlockId("ab" * 32, bytes(32), 0, tuple(range(16))), {"kv0": tensor("BF16")})
    store = Store(tmp_path / "store", Namespace("m", "f" * 64, "1" * 64, 16), as_int8=True)
    assert store.put(block)
    (file,) = tmp_path.rglob("*.safetensors")
    assert file.stat().st_size < 0.6 * block.nbytes
    found = store.get(block.id)
    assert found is not None
    assert np.abs(numbers(found["kv0"]) - numbers(block.tensors["kv0"])).max() < 0.1
    plain = Store(tmp_path / "store", Namespace("m", "f" * 64, "1" * 64, 16)).get(block.id)
    assert plain is not None and "kv0" not in plain, "told apart by names too, were the layout ever the same"
