"""What each token of a model reads as, byte for byte, and the same for llguidance, which needs it to follow a grammar.

Made when first asked for, and kept. Any thread. Must not import MLX.
"""

import threading
from dataclasses import dataclass

from llguidance import LLTokenizer
from tokenizers import Tokenizer


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
        self._lock = threading.Lock()  # guards _matching while it is made
        self._matching: LLTokenizer | None = None
        self._texts: dict[int, TokenText] = {}

    @property
    def matching(self) -> LLTokenizer:
        """Raises ValueError: a kind of tokenizer that llguidance cannot read. Making it holds the interpreter for a third of
        a second at 49k tokens, so it is not done for a model that never needs it.
        """
        with self._lock:
            if self._matching is None:
                self._matching = LLTokenizer(self._tokenizer.to_str(), n_vocab=self._size, eos_token=self._eos_ids)
            return self._matching

    def text_of(self, token: int) -> TokenText:
        """Raises ValueError, as `matching`."""
        found = self._texts.get(token)
        if found is None:
            raw = self.matching.decode_bytes([token])
            found = self._texts[token] = TokenText(readable(raw), raw, self.matching.is_special_token(token))
        return found


def readable(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
