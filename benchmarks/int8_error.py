"""What int8 blocks cost in exactness: the same prompts continued from native and from packed KV, without a server.

For each prompt all but its last tokens are prefilled once; the rest is then computed from that cache as it is, and from the
same cache packed and unpacked as the disk would do it. Both are also left to go on greedily.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prompts import Prompts
from cachestore import int8
from cachestore.block import Tensor
from tests.stands.models import smollm2_dir
from worker.blas import load_openblas
from worker.text import Text

TEACHER_TOKENS = 128
"""Compared with the text given, so that one early difference is not counted again at every later token."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8_error", description=__doc__)
    parser.add_argument("--model", type=Path, help="an MLX model directory; default: SmolLM2, imported once")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=600, help="of each prompt")
    parser.add_argument("--answer", type=int, default=64, help="greedy tokens of each answer")
    args = parser.parse_args()
    load_openblas()
    from mlx_lm import load

    path = (args.model or smollm2_dir()).resolve()
    model, _ = load(str(path))
    text, prompts = Text.open(path), Prompts(path, seed=7)
    worst, total, compared, same_top, agreeing, answers = 0.0, 0.0, 0, 0, 0, 0
    for number in range(args.prompts):
        ids = text.encode_chat([{"role": "user", "content": prompts.fresh(args.tokens)}])
        differences, same = compare(model, ids)
        worst, total = max(worst, max(differences)), total + sum(differences)
        compared, same_top = compared + len(differences), same_top + same
        agreed = agreement(model, ids, args.answer)
        agreeing, answers = agreeing + (agreed == args.answer), answers + 1
        print(f"{number + 1}/{args.prompts}: {agreed} of {args.answer} greedy tokens agree", file=sys.stderr, flush=True)
    print(f"\n  {path.name}: {args.prompts} prompts of {args.tokens} tokens, KV as {int8.NAME} against native")
    print(f"  log-probability of the given token, largest difference   {worst:.4f}")
    print(f"  the same, mean                                           {total / compared:.4f}")
    print(f"  most likely token is the same one                        {same_top} of {compared}")
    print(f"  greedy answers of {args.answer} tokens that are equal                {agreeing} of {answers}")
    return 0


def compare(model, ids: Sequence[int]) -> tuple[list[float], int]:
    """Of the prompt's end: differences of the given tokens' log-probabilities, and how often both prefer the same token."""
    import mlx.core as mx

    cut = len(ids) - TEACHER_TOKENS
    rest = mx.array([ids[cut:]])
    native, packed = (mx.log(mx.softmax(model(rest, cache=cache)[0], axis=-1)) for cache in caches(model, ids[:cut]))
    given = mx.array(ids[cut + 1 :])[:, None]
    difference = mx.abs(mx.take_along_axis(native[:-1], given, axis=-1) - mx.take_along_axis(packed[:-1], given, axis=-1))
    same = mx.sum(mx.argmax(native[:-1], axis=-1) == mx.argmax(packed[:-1], axis=-1))
    return difference.flatten().tolist(), int(same.item())


def agreement(model, ids: Sequence[int], answer_tokens: int) -> int:
    """How many greedy tokens from the first on are the same."""
    import mlx.core as mx

    answers = []
    for cache in caches(model, ids[:-1]):
        token, answer = ids[-1], []
        for _ in range(answer_tokens):
            token = int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item())
            answer.append(token)
        answers.append(answer)
    return next((i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), answer_tokens)


def caches(model, ids: Sequence[int]) -> tuple[list, list]:
    """The cache of a prefix as it is, and as it comes back from disk."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    native, packed = make_prompt_cache(model), make_prompt_cache(model)
    for start in range(0, len(ids), 256):
        model(mx.array([ids[start : start + 256]]), cache=native)
        mx.eval([leaf.state for leaf in native])
    for own, copy in zip(native, packed, strict=True):
        copy.update_and_fetch(*(_through_int8(rows[:, :, : own.offset]) for rows in (own.keys, own.values)))
    return native, packed


def _through_int8(rows):
    import mlx.core as mx
    import numpy as np

    if rows.dtype == mx.bfloat16:
        name, plain = "BF16", np.array(rows.view(mx.uint16))
    else:
        plain = np.array(rows)
        name = {"float32": "F32", "float16": "F16"}[plain.dtype.name]
    before = {"kv0": Tensor(name, plain[None].shape, plain.tobytes())}
    after = mx.array(np.frombuffer(int8.unpack(int8.pack(before))["kv0"].data, plain.dtype).reshape(plain.shape))
    return after.view(mx.bfloat16) if name == "BF16" else after


if __name__ == "__main__":
    sys.exit(main())
