"""One sequence's text as its tokens come: whole characters only, and nothing that may still become a stop string.

Knows a tokenizer and stop strings; must not know end tokens, sampling or the engine.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PRIMING_TOKENS = 8
"""Prompt tokens stepped through the decoder first: SentencePiece decoders drop the space of whatever comes first."""

MAX_UNDECODED_TOKENS = 16
"""A character has at most 4 bytes: more tokens than this without text are no character and are shown as they decode."""


class TextStream:
    """One push per token, on one thread. End tokens are never pushed."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._shown: list[int] = []  # the tokens of the last text that came out: what the pending ones are decoded after
        self._pending: list[int] = []
        self._decoder = DecodeStream(skip_special_tokens=True)
        self.stopped_by: str | None = None
        """The stop string that matched; the caller ends the sequence."""
        self._of_prompt = ""
        for token in prompt_ids[-PRIMING_TOKENS:]:
            self._decode(token)
        self._of_prompt = self._pending_text()
        """How a character that the prompt ends in the midst of reads, until other text came: it is not said again."""

    def push(self, token: int) -> str:
        """The text now safe to show; after a stop match the text before it, then nothing."""
        return self._show(self._own(self._decode(token)))

    def close(self) -> str:
        """What was held back, at an end by end token or length. A character cut in half is dropped."""
        return self._show(self._own(self._pending_text().rstrip("\ufffd"))) + self._stops.release()

    def _own(self, text: str) -> str:
        """`text` without what the prompt ended with; a character that was completed is shown whole."""
        if not text or not self._of_prompt:
            return text
        of_prompt, self._of_prompt = self._of_prompt, ""
        return text.removeprefix(of_prompt)

    def _show(self, text: str) -> str:
        shown = self._stops.feed(text)
        self.stopped_by = self._stops.matched
        return shown

    def _decode(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._decoder.step(self._tokenizer, token)
        except Exception:  # the library raises nothing narrower: invalid bytes changed the text already given out
            return self._start_over()
        if text is not None:
            self._shown, self._pending = self._pending, []
        elif len(self._pending) > MAX_UNDECODED_TOKENS:
            return self._start_over()
        return text or ""

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._shown)
        both = self._tokenizer.decode(self._shown + self._pending)
        return both.removeprefix(before) if both.startswith(before) else self._tokenizer.decode(self._pending)

    def _start_over(self) -> str:
        """Gives out the undecodable tokens as they are and goes on after the last good ones."""
        text = self._pending_text()
        self._pending = []
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in self._shown:
            self._decoder.step(self._tokenizer, token)
        return text


class StopStrings:
    """Finds the stop string that is complete first, whatever the pieces the text comes in."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held: str = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
        else:
            at = min(_possible_start(text, stop) for stop in self._stops)
            self._held = text[at:]
        return text[:at]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held


def _possible_start(text: str, stop: str) -> int:
    """Where the longest end of `text` that begins `stop` starts; len(text) if none does."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
