"""One model's text: tokenizer, chat template, end tokens, from files only.

The same code counts prompts in the text worker and builds them where the model runs, so the two cannot disagree. Must not
import mlx, mlx_lm or transformers: the text worker stays small, and on the main thread MLX delays signals by seconds.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from worker.chat_template import ChatTemplate, TemplateError
from worker.model_files import ModelFiles, ModelUnreadable
from worker.text_stream import TextStream

__all__ = ["ModelUnreadable", "TemplateError", "Text", "TextStream"]

CONVERT_TIMEOUT_S = 120.0
SLOW_TOKENIZER_FILES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt")


FEW_CHARS_PER_TOKEN = 8
"""A token is 3 to 5 characters of most texts: one that has so many for each token it may have is likely too long."""
LOOK_CHARS = 1 << 20
"""What is shorter is tokenized whole: half a second, and the number of tokens is exact."""


class TooLong(Exception):
    """A text of at least so many tokens, which is more than anybody can use."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class Text:
    """Thread-safe: the tokenizer and compiled templates are only read."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(files.templates, files.special_tokens)
        self.context = files.context
        self.defaults = files.defaults
        """Sampling defaults from generation_config.json."""
        self.vocab_size = files.vocab_size or tokenizer.get_vocab_size()
        named = {key: tokenizer.token_to_id(token) for key, token in files.special_tokens.items()}
        self.eos_ids = files.eos_ids | {i for i in (named.get("eos_token"),) if i is not None}
        self.bos_id = named.get("bos_token", files.bos_id)

    @property
    def tokenizer(self) -> Tokenizer:
        """For reading only."""
        return self._tokenizer

    @classmethod
    def open(cls, path: Path) -> "Text":
        """Raises ModelUnreadable."""
        return cls(ModelFiles.read(path), _open_tokenizer(path))

    def encode_chat(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        continue_final: bool = False,
        most_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's token ids; the template writes the special tokens itself.

        Raises TemplateError, and TooLong as soon as it is known that there are many more than `most_tokens`.
        """
        text = self._template.render(messages, tools, template_kwargs or {}, continue_final=continue_final)
        return self._encode(text, special_tokens=False, most_tokens=most_tokens)

    def encode_text(self, text: str, *, most_tokens: int | None = None) -> list[int]:
        """Token ids with the special tokens this tokenizer puts around a text of its own accord. Raises TooLong as above."""
        return self._encode(text, special_tokens=True, most_tokens=most_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Visible text: special tokens are left out, as they are in a stream."""
        return self._tokenizer.decode(list(ids))

    def stream(self, prompt_ids: Sequence[int], stops: Sequence[str]) -> TextStream:
        return TextStream(self._tokenizer, prompt_ids, stops)

    def _encode(self, text: str, *, special_tokens: bool, most_tokens: int | None = None) -> list[int]:
        if most_tokens is not None:
            self._refuse_what_is_much_too_long(text, most_tokens)
        return self._tokens(text, special_tokens=special_tokens)

    def _refuse_what_is_much_too_long(self, text: str, most_tokens: int) -> None:
        """From ever longer beginnings: 15 MB took tens of seconds to be told no. Where a text is cut changes a few tokens."""
        clearly_more = most_tokens + most_tokens // 8 + 64
        length = max(LOOK_CHARS, FEW_CHARS_PER_TOKEN * most_tokens)
        while length < len(text):
            tokens = len(self._tokens(text[:length], special_tokens=False))
            if tokens > clearly_more:
                raise TooLong(tokens)
            length *= 2

    def _tokens(self, text: str, *, special_tokens: bool) -> list[int]:
        # The batch call lets go of the GIL, `encode` does not: 360k tokens held up every other thread for 0.78 s, this for
        # 0.01 s. It also leaves out offsets, which halves the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids


def _open_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_str(_converted(path))
    except ModelUnreadable:
        raise
    except Exception as e:  # the library raises nothing narrower
        raise ModelUnreadable(f"{file}: {e}") from e
    tokenizer.no_truncation()  # a saved limit would cut prompts silently
    tokenizer.no_padding()
    return tokenizer


def _converted(path: Path) -> str:
    """tokenizer.json of a model that has none; seconds, in a process that takes transformers away with it."""
    if not any(file for pattern in SLOW_TOKENIZER_FILES for file in path.glob(pattern)):
        raise ModelUnreadable(f"{path} has no tokenizer (tokenizer.json, tokenizer.model, …)")
    command = [sys.executable, "-P", "-m", "worker.slow_tokenizer", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise ModelUnreadable(f"{path}: converting its tokenizer took longer than {CONVERT_TIMEOUT_S:.0f} s") from e
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelUnreadable(f"{path} has no tokenizer.json and its tokenizer cannot be converted: {reason}")
    return done.stdout
