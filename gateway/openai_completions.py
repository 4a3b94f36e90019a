"""POST /v1/completions: plain text or token ids in, text out. Several prompts are several choices, each its own request."""

import time

from aiohttp import web
from pydantic import ValidationError

from gateway.answer import answer
from gateway.body import json_object
from gateway.desk import DESK, IGNORED, REQUEST_ID, json_response
from gateway.errors import ApiError
from gateway.inbox import Output, Started
from gateway.openai_fields import COMPLETIONS
from gateway.openai_sse import Envelope, Frames, UsageWanted
from gateway.openai_types import CompletionRequest, invalid
from gateway.openai_usage import usage_body
from gateway.stream import stream


async def completions(request: web.Request) -> web.StreamResponse:
    desk = request.app[DESK]
    body = await json_object(request, desk.config)
    request[IGNORED] = desk.note_ignored(COMPLETIONS.ignored(body))
    try:
        completion = CompletionRequest.model_validate(body)
    except ValidationError as e:
        raise invalid(e) from None
    desk.require_model(completion.model)
    envelope = Envelope(
        id=f"cmpl-{request[REQUEST_ID].removeprefix('req_')}",
        kind="text_completion",
        created=int(time.time()),
        model=completion.model,
        fingerprint=desk.fingerprint,
    )
    with answer(desk.link, request[REQUEST_ID], completion.neutral()) as held:
        if completion.stream:
            wanted = UsageWanted(at_end=completion.include_usage, in_every_chunk=completion.continuous_usage)
            return await stream(request, held, CompletionChunks(envelope, wanted), desk.pace)
        choices = await held.whole()
    answered = envelope.body([_choice(index, "".join(choice.text), choice.finish) for index, choice in enumerate(choices)])
    answered["usage"] = usage_body(choice.usage for choice in choices if choice.usage is not None)
    return json_response(answered)


class CompletionChunks:
    def __init__(self, envelope: Envelope, wanted: UsageWanted) -> None:
        self._frames = Frames(envelope, wanted)

    def opening(self) -> bytes:
        return self.keep_alive()

    def started(self, update: Started) -> None:
        self._frames.started(update)

    def output(self, update: Output) -> bytes:
        self._frames.count(update)
        text = "".join(piece.text for piece in update.row.pieces)
        if not text and update.row.finish is None:
            return b""
        return self._frames.chunk(_choice(update.index, text, update.row.finish))

    def keep_alive(self) -> bytes:
        return self._frames.chunk(_choice(0, "", None))

    def closing(self) -> bytes:
        return self._frames.closing()

    def error(self, error: ApiError) -> bytes:
        return self._frames.error(error)


def _choice(index: int, text: str, finish: str | None) -> dict[str, object]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": finish}
