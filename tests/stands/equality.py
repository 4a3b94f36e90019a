"""The one place that decides whether two greedy answers are the same.

Two runs of one model may add up in another order: in another batch, or from another chunk edge on. So answers count as
equal when they are, or when at the first difference the model alone, in float32, found its two best tokens less than
`NEAR_TIE` apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from worker.blas import load_openblas

NEAR_TIE = 1e-3
SPARE_TOKENS = 8


def greedy_ids(model_dir: Path, prompt_ids: Sequence[int], count: int) -> list[int]:
    """What mlx_lm alone generates, without looking for an end token."""
    load_openblas()
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    prompt = mx.array(list(prompt_ids))
    steps = generate_step(prompt, _model(model_dir), max_tokens=count)
    return [int(token) for token, _ in steps]


def greedy_text(model_dir: Path, prompt_ids: Sequence[int], count: int) -> str:
    return _tokenizer(model_dir).decode(greedy_ids(model_dir, prompt_ids, count))


def assert_same_greedy(
    model_dir: Path, prompt_ids: Sequence[int], expected: Sequence[int] | str, got: Sequence[int] | str
) -> None:
    """Both token ids, or both texts. A part of the expected answer is not the same as all of it."""
    if expected == got:
        return
    if isinstance(expected, str):
        assert isinstance(got, str)
        ids, index = _ids_up_to_difference(model_dir, prompt_ids, expected, got)
    else:
        ids, index = list(expected), _common(expected, got)
    assert index < len(ids), f"{got!r} goes on after {expected!r}"
    assert index < len(got), f"{got!r} is shorter than {expected!r}"
    margin = top_two_margin(model_dir, [*prompt_ids, *ids[:index]])
    assert margin < NEAR_TIE, f"token {index} differs, margin {margin:.4g}:\nexpected {expected!r}\ngot      {got!r}"


def top_two_margin(model_dir: Path, ids: Sequence[int]) -> float:
    """By how much the best next logit beats the second."""
    import mlx.core as mx

    logits = _model(model_dir)(mx.array([list(ids)]))[0, -1].astype(mx.float32)
    second, first = sorted(cast("list[float]", mx.topk(logits, 2).tolist()))
    return first - second


def model_logprobs(model_dir: Path, ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """`[len(ids), vocabulary]`: after each of the tokens, how likely the model alone finds each next one."""
    import mlx.core as mx

    logits = np.array(_model(model_dir)(mx.array([list(ids)]))[0].astype(mx.float32), dtype=np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _ids_up_to_difference(model_dir: Path, prompt_ids: Sequence[int], expected: str, got: str) -> tuple[list[int], int]:
    tokenizer = _tokenizer(model_dir)
    ids = greedy_ids(model_dir, prompt_ids, len(tokenizer.encode(expected, add_special_tokens=False).ids) + SPARE_TOKENS)
    shared = _common(expected, got)
    for index in range(len(ids)):
        if len(tokenizer.decode(ids[: index + 1]).rstrip("�")) > shared:
            return ids, index
    return ids, len(ids)


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@functools.lru_cache(maxsize=4)
def _model(model_dir: Path):
    load_openblas()
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(model_dir)
    model.set_dtype(mx.float32)
    return model


@functools.lru_cache(maxsize=4)
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))
