"""The frame around OpenAI's stream events: one id, model and time for all chunks of a stream, usage on request, then `[DONE]`.

What a choice looks like differs between chat and completions and is theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.errors import ApiError, error_body
from gateway.inbox import Output, Started
from gateway.openai_usage import usage_body
from supervisor.protocol import Usage

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of a stream, or the whole body of a plain answer, have in common."""

    id: str
    kind: str
    created: int
    model: str
    """As the client named it."""
    fingerprint: str

    def body(self, choices: Sequence[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class UsageWanted:
    at_end: bool
    in_every_chunk: bool
    timings: Callable[[], dict[str, object]] | None = None
    """Of the whole answer, for its last chunk with anything in it."""


class Frames:
    """Turns choices into events and keeps the token counts that go with them."""

    def __init__(self, envelope: Envelope, wanted: UsageWanted, choices: int) -> None:
        self._envelope = envelope
        self._wanted = wanted
        self._unfinished = list(range(choices))
        self._usages: dict[int, Usage] = {}
        self._opening = _opening(envelope)
        """Of every chunk, up to what its choice says."""

    @property
    def unfinished(self) -> int:
        """The index of a choice that still goes on: what fills a silence belongs to it."""
        return self._unfinished[0] if self._unfinished else 0

    def started(self, update: Started) -> None:
        accepted = update.accepted
        self._usages[update.index] = Usage(
            prompt_tokens=accepted.prompt_tokens,
            completion_tokens=0,
            cached_hot=accepted.cached_hot,
            cached_cold=accepted.cached_cold,
        )

    def count(self, update: Output) -> None:
        row = update.row
        if row.finish is not None:
            self._unfinished.remove(update.index)
        if row.usage is not None:
            self._usages[update.index] = row.usage
        elif self._wanted.in_every_chunk or row.finish is not None:
            # Only the first choice of a prompt is told of its start, and only that one counts the prompt.
            before = self._usages.get(update.index) or Usage(prompt_tokens=0, completion_tokens=0)
            self._usages[update.index] = msgspec.structs.replace(before, completion_tokens=row.tokens)

    def chunk(self, choice: dict[str, object]) -> bytes:
        return b"".join((self._opening, _encoder.encode(choice), b"]", self._rest(choice), b"}\n\n"))

    def _rest(self, choice: dict[str, object]) -> bytes:
        """The keys that follow the choices."""
        if self._wanted.at_end:
            usage = usage_body(self._usages.values()) if self._wanted.in_every_chunk else None
            return b',"usage":' + _encoder.encode(usage)
        if self._wanted.timings is not None and not self._unfinished and choice["finish_reason"] is not None:
            return b',"timings":' + _encoder.encode(self._wanted.timings())
        return b""

    def closing(self) -> bytes:
        if not self._wanted.at_end:
            return DONE
        body = {**self._envelope.body([]), "usage": usage_body(self._usages.values())}
        if self._wanted.timings is not None:
            body["timings"] = self._wanted.timings()
        return _event(body) + DONE

    def error(self, error: ApiError) -> bytes:
        """No finish_reason and no [DONE] follow: clients take either for success."""
        return _event(error_body(error))


def _opening(envelope: Envelope) -> bytes:
    """What is the same in each of many chunks is encoded once."""
    return b"data: " + _encoder.encode(envelope.body([])).removesuffix(b"]}")


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"
