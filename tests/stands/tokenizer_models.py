"""Small tokenizers of the kinds that models have, as model directories without weights.

`byte_level` is GPT-2's, Llama 3's and Qwen's kind; `sentencepiece` Llama 2's and Gemma's: spaces as ▁, bytes it has no token
for as <0xNN>, and with `strips_space` a decoder that drops the space before the first token.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WORDS = (
    "The capital of France is Paris. What is the capital of Spain? Madrid. the quick brown fox jumps over the lazy dog and "
    "the rest of the story is told by the people who were there. Stop here, please. user assistant model system."
)
SPECIAL = ["<unk>", "<s>", "</s>", "<start>", "<end>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def byte_level(path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    return model_directory(path, tokenizer.to_str())


def sentencepiece(path: Path, *, strips_space: bool) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    return model_directory(path, json.dumps(_with_bytes(json.loads(tokenizer.to_str()))))


def _with_bytes(tokenizer: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    model = tokenizer["model"]
    vocab = model["vocab"]
    assert isinstance(vocab, dict)
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    model |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    return tokenizer


def model_directory(path: Path, tokenizer_json: str | None, **files: object) -> Path:
    """`files` are further JSON files by their stem; config and tokenizer_config have sensible ones of their own."""
    path.mkdir(parents=True, exist_ok=True)
    contents = {
        "config": {"model_type": "llama", "max_position_embeddings": 2048},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<end>",
            "unk_token": "<unk>",
            "chat_template": TEMPLATE,
        },
    }
    for stem, content in (contents | files).items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    if tokenizer_json is not None:
        (path / "tokenizer.json").write_text(tokenizer_json)
    return path
