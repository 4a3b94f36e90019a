"""What a worker reports about tokens, in OpenAI's two shapes for it: chat's list of objects and completions' columns."""

import codecs
from collections.abc import Mapping, Sequence
from typing import cast

Entry = Mapping[str, object]


def chat_logprobs(entries: Sequence[Entry]) -> dict[str, object]:
    content = [{**_token(entry), "top_logprobs": [_token(top) for top in _top(entry)]} for entry in entries]
    return {"content": content, "refusal": None}


def _token(entry: Entry) -> dict[str, object]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(cast(bytes, entry["bytes"]))}


def _top(entry: Entry) -> list[Entry]:
    return cast("list[Entry]", entry["top"])


class CompletionLogprobs:
    """Of one choice; knows how much text came before, for the offsets. One call per chunk, or one for all.

    `echoed` is the text the choice begins with where it is the client's own words: in it special tokens can be read.
    """

    def __init__(self, echoed: str = "") -> None:
        self._echoed = echoed
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("ignore")

    def columns(self, entries: Sequence[Entry]) -> dict[str, object]:
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [self._offset_of(entry) for entry in entries],
        }

    def _top(self, entry: Entry) -> dict[str, object] | None:
        """The token itself is always among them, as in OpenAI's: one more than asked for where it is not a likely one."""
        if entry["logprob"] is None:
            return None
        return {cast(str, found["token"]): found["logprob"] for found in (*_top(entry), entry)}

    def _offset_of(self, entry: Entry) -> int:
        offset = self._offset
        if not entry["special"] or self._echoed.startswith(cast(str, entry["token"]), offset):
            self._offset += len(self._characters.decode(cast(bytes, entry["bytes"])))
        return offset
