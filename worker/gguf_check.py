"""Proves that an imported directory is a model: loads it with mlx-lm and decodes a few tokens.

The only part of the import that uses MLX. It knows the directory, not where it came from.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol, cast

from worker.blas import load_openblas
from worker.gguf import ImportRefused

QUESTION = "What is the capital of France?"
TEXT = "The capital of France is"
SAMPLE_TOKENS = 16
# The sample ends early after this long: packed weights on a CPU take seconds a token.
SAMPLE_TIME_S = 10.0


class _Tokenizer(Protocol):
    chat_template: str | None
    eos_token_ids: set[int]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...


def has_gpu() -> bool:
    load_openblas()
    import mlx.core as mx

    return mx.metal.is_available() or mx.cuda.is_available()


def greedy_sample(directory: Path) -> str:
    """What the model says first. Raises ImportRefused if it does not load or its logits are not finite."""
    load_openblas()
    import mlx.core as mx
    from mlx_lm.generate import generate_step  # pyright: ignore[reportUnknownVariableType] untyped
    from mlx_lm.utils import load  # pyright: ignore[reportUnknownVariableType] untyped

    try:
        loaded = load(str(directory))
    except (ValueError, KeyError, TypeError) as error:
        raise ImportRefused("check_failed", f"the imported model does not load: {error}") from error
    model, tokenizer = loaded[0], cast(_Tokenizer, loaded[1])
    prompt = mx.array(_prompt(tokenizer))
    tokens: list[int] = []
    end_s = time.monotonic() + SAMPLE_TIME_S
    for token, logprobs in generate_step(prompt, model, max_tokens=SAMPLE_TOKENS):
        if not mx.isfinite(logprobs).all().item():
            raise ImportRefused(
                "check_failed", "the imported model computes NaN or infinite logits. Import with --dtype float32 or bfloat16."
            )
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(int(token))
        if time.monotonic() > end_s:
            break
    return tokenizer.decode(tokens)


def _prompt(tokenizer: _Tokenizer) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer.encode(TEXT, add_special_tokens=True)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
