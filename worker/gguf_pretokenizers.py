"""How text is cut into words before byte-level BPE, by the name a GGUF gives (`tokenizer.ggml.pre`).

The names and their rules are llama.cpp's, the patterns those of the original tokenizers. Nothing but that table is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from worker.gguf import ImportRefused

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`pattern` cuts what `single_digits` left whole. With `whole_words` a word in the vocabulary is taken without merging.
    `add_bos` holds where the GGUF does not say."""

    pattern: str
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([*digits, split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_BY_NAME = {
    "gpt-2": PreTokenizer(_GPT2),
    "smollm": PreTokenizer(_GPT2, single_digits=True),
    "llama-bpe": PreTokenizer(_LLAMA3, whole_words=True, add_bos=True),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, add_bos=True),
}
_ALIASES = {
    "default": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """GGUFs from before the key existed have no name, and mean GPT-2's rule."""
    known = _ALIASES.get(name or "default", name or "default")
    if known not in _BY_NAME:
        raise ImportRefused(
            "unsupported_tokenizer",
            f"the GGUF cuts text by the rule {name}; known are {', '.join(sorted({*_BY_NAME, *_ALIASES}))}. "
            "Look for an MLX or safetensors version of this model, which brings its own tokenizer.",
        )
    return _BY_NAME[known]
