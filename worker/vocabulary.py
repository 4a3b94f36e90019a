"""What each token of a model reads as, byte for byte, and the same for llguidance, which needs it to follow a grammar.

Tokens are read from the tokenizer one by one: llguidance's own reader parses the whole tokenizer again and holds the
interpreter for 1.4 s at 262k tokens; this way nobody waits more than 10 ms. Any thread. Must not import MLX.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokensUnreadable(ValueError):
    """A kind of tokenizer whose tokens are neither byte-level nor SentencePiece's."""


@dataclass(frozen=True, slots=True)
class TokenText:
    token: str
    """Readable; what is not a whole character is written as OpenAI does, `bytes:\\xe2\\x80`."""
    raw: bytes
    is_special: bool
    """Leaves no trace in an answer's text."""


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._size = max(size, tokenizer.get_vocab_size())
        self._eos_ids = sorted(eos_ids)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special} | eos_ids
        self._to_bytes = _reader(tokenizer)
        self._lock = threading.Lock()  # guards _matching while it is made
        self._matching: LLTokenizer | None = None
        self._texts: dict[int, TokenText] = {}

    @property
    def matching(self) -> LLTokenizer:
        """Made when first asked for, and kept: 2 s at 262k tokens. Raises TokensUnreadable."""
        with self._lock:
            if self._matching is None:
                self._matching = LLTokenizer(TokenizerWrapper(_Tokens(self)), n_vocab=self._size, eos_token=self._eos_ids)
            return self._matching

    def text_of(self, token: int) -> TokenText:
        """Raises TokensUnreadable."""
        found = self._texts.get(token)
        if found is None:
            raw = self.raw(token)
            found = self._texts[token] = TokenText(readable(raw), raw, token in self._special)
        return found

    def raw(self, token: int) -> bytes:
        """Empty for an id without a token. Raises TokensUnreadable."""
        if self._to_bytes is None:
            raise TokensUnreadable("its tokens are neither byte-level nor SentencePiece's")
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        return b"" if piece is None else self._to_bytes(piece)

    @property
    def size(self) -> int:
        return self._size

    @property
    def eos_ids(self) -> list[int]:
        return self._eos_ids

    @property
    def special(self) -> set[int]:
        return self._special

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class _Tokens:
    """A vocabulary as llguidance wants to see it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.raw(token) for token in range(vocabulary.size)]
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def readable(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _reader(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """From a token as the tokenizer writes it to its bytes."""
    kinds = set(_decoder_kinds(tokenizer))
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _from_sentencepiece
    return None


def _decoder_kinds(tokenizer: Tokenizer) -> Iterator[str]:
    decoder = cast("object", tokenizer.decoder)
    if decoder is None:
        return
    state = cast("dict[str, object]", json.loads(cast(bytes, decoder.__getstate__())))
    for step in cast("list[dict[str, object]]", state.get("decoders", [state])):
        yield str(step["type"])


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(piece: str) -> bytes:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode()  # no tokenizer makes it from text


def _from_sentencepiece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
