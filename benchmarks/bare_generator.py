"""mlx-lm's BatchGenerator alone, in a process of its own: what decoding costs where nothing is served.

`python -m benchmarks.bare_generator MODEL` answers each line of JSON, `{"prompts": [text, …], "max_tokens": n}`, with one: the
CPU seconds, wall seconds and tokens from the first step in which all decode to the first in which one is over.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from worker.blas import load_openblas

load_openblas()  # before anything imports MLX

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402


def main() -> None:
    model, tokenizer = load(sys.argv[1])[:2]
    print(json.dumps({"model": Path(sys.argv[1]).name}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in request["prompts"]
        ]
        print(json.dumps(decode(model, prompts, request["max_tokens"], tokenizer.eos_token_ids)), flush=True)


def decode(model: object, prompts: Sequence[list[int]], max_tokens: int, eos_ids: Sequence[int]) -> dict[str, float]:
    generator = BatchGenerator(model, max_tokens=max_tokens, stop_tokens=[[token] for token in eos_ids], sampler=greedy)
    generator.insert(list(prompts))
    tokens, began = 0, (0.0, 0.0)
    while True:
        _, responses = generator.next()
        if began[0]:
            tokens += len(responses)
        elif len(responses) == len(prompts):
            began = time.process_time(), time.perf_counter()
        if any(response.finish_reason for response in responses):
            break
    outcome = {"cpu_s": time.process_time() - began[0], "wall_s": time.perf_counter() - began[1], "tokens": tokens}
    generator.close()
    mx.clear_cache()
    return outcome


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


if __name__ == "__main__":
    main()
