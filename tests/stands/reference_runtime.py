"""llama.cpp (the `xllamacpp` package) in this process, as the word on what a GGUF says and how it cuts text.

Its cache is float32 and its attention the plain one, so that what differs from MLX is rounding, not precision settings.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

runtime: Any = xllamacpp  # which has no types


class ReferenceRuntime:
    def __init__(self, gguf: Path, context_tokens: int = 512) -> None:
        params = runtime.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx = context_tokens
        params.n_parallel = 1
        params.warmup = False
        # Two threads spin while they wait for each other, which on a busy machine costs minutes.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = runtime.ggml_type.GGML_TYPE_F32
        params.cache_type_v = runtime.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = runtime.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = runtime.Server(params)

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())["tokens"]

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        return [step["id"] for step in self._complete(prompt, tokens, top=1)]

    def logprobs(self, prompt: list[int], top: int) -> dict[int, float]:
        """Of the token after the prompt, the `top` likeliest."""
        return {entry["id"]: entry["logprob"] for entry in self._complete(prompt, 1, top)[0]["top_logprobs"]}

    def _complete(self, prompt: list[int], tokens: int, top: int) -> list[dict]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": top, "cache_prompt": False}
        reply = self._server.handle_completions(body)
        return reply["choices"][0]["logprobs"]["content"]
