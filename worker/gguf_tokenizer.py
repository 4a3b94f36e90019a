"""tokenizer.json and tokenizer_config.json from a GGUF's vocabulary, merges, scores and token types.

Two kinds exist: byte-level BPE (`gpt2`) and SentencePiece (`llama`), whose scores become merges. The result must cut text
exactly as llama.cpp does; it knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from worker.gguf import GgufFile, ImportRefused
from worker.gguf_pretokenizers import pre_tokenizer

SPACE = "▁"  # SentencePiece's visible space


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def of_type(self, kind: TokenType) -> Iterator[str]:
        return (token for token, its in zip(self.tokens, self.types, strict=True) if its == kind)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    kind = file.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(file)
    if kind == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, vocabulary)
    else:
        raise ImportRefused("unsupported_tokenizer", f"the GGUF's tokenizer is of kind {kind}; importable are gpt2 and llama.")
    _add_matched_tokens(tokenizer, vocabulary)
    _add_frame(tokenizer, file, vocabulary)
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise ImportRefused("damaged_gguf", "the GGUF's merges name tokens that its vocabulary does not have.")
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    tokens = _vocabulary(file).tokens
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos(file),
        "add_eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer(f"{file.architecture}.context_length"),
        "chat_template": file.text("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.integer(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    return {key: value for key, value in config.items() if value is not None}


def named_templates(file: GgufFile) -> dict[str, str]:
    """Chat templates beside the default one, such as `tool_use`."""
    names = file.list_of("tokenizer.chat_templates", str)
    found = {name: file.text(f"tokenizer.chat_template.{name}") for name in names if name != "default"}
    return {name: text for name, text in found.items() if text}


def adds_bos(file: GgufFile) -> bool:
    if file.integer("tokenizer.ggml.bos_token_id") is None:
        return False
    sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    default = sentencepiece or pre_tokenizer(file.text("tokenizer.ggml.pre")).add_bos
    return file.flag("tokenizer.ggml.add_bos_token", default)


def _vocabulary(file: GgufFile) -> Vocabulary:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(file.list_of("tokenizer.ggml.tokens", str))]
    types = file.list_of("tokenizer.ggml.token_type", int) or [int(TokenType.NORMAL)] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ImportRefused("damaged_gguf", f"the GGUF has {len(tokens)} tokens but {len(types)} token types.")
    if len(set(tokens)) != len(tokens):
        raise ImportRefused("unsupported_tokenizer", f"{len(tokens) - len(set(tokens))} tokens of the vocabulary occur twice.")
    return Vocabulary(tokens, types)


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    rule = pre_tokenizer(file.text("tokenizer.ggml.pre"))
    merges = [_pair(merge) for merge in file.list_of("tokenizer.ggml.merges", str)]
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=rule.whole_words)
    tokenizer = Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # The first character may itself be a space, so the separator is looked for after it.
    left, separator, right = merge[1:].partition(" ")
    if not separator:
        raise ImportRefused("damaged_gguf", f"{merge!r} is not a merge of two tokens.")
    return merge[0] + left, right


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=merges_from_scores(vocabulary, file.list_of("tokenizer.ggml.scores", float)),
        unk_token=vocabulary.tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_visible = normalizers.Replace(" ", SPACE)
    to_spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_visible])
        tokenizer.decoder = decoders.Sequence([*to_spaces, decoders.Strip(content=" ", left=1, right=0)])
    else:
        tokenizer.normalizer = to_visible
        tokenizer.decoder = decoders.Sequence(to_spaces)
    return tokenizer


def merges_from_scores(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece always joins the two neighbours whose joint piece scores highest, so every split of a piece into two
    other pieces is a merge, ranked by the piece's score. Only normal pieces are ever joined."""
    if len(scores) != len(vocabulary.tokens):
        raise ImportRefused("damaged_gguf", f"the GGUF has {len(vocabulary.tokens)} tokens but {len(scores)} scores.")
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[i], ids[left], ids[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_matched_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Both kinds are found in the raw text before anything else; only control tokens disappear from decoded text."""
    own = [AddedToken(token, normalized=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    control = [AddedToken(token, normalized=False) for token in vocabulary.of_type(TokenType.CONTROL)]
    tokenizer.add_tokens(own)  # pyright: ignore[reportUnknownMemberType] its stub says list without an element type
    tokenizer.add_special_tokens(control)  # pyright: ignore[reportUnknownMemberType] likewise


def _add_frame(tokenizer: Tokenizer, file: GgufFile, vocabulary: Vocabulary) -> None:
    """The tokens put before and after a text that is encoded with special tokens."""
    bos, eos = file.integer("tokenizer.ggml.bos_token_id"), file.integer("tokenizer.ggml.eos_token_id")
    before = [vocabulary.tokens[bos]] if bos is not None and adds_bos(file) else []
    after = [vocabulary.tokens[eos]] if eos is not None and file.flag("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        ids = vocabulary.ids
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(token, ids[token]) for token in dict.fromkeys(before + after)]
        )
