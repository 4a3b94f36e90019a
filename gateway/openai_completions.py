"""POST /v1/completions: plain text or token ids in, text out. Each prompt is a request of its own with `n` choices."""

import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from gateway.answer import Choice, answer
from gateway.body import json_object
from gateway.desk import DESK, IGNORED, RECORD, json_response
from gateway.errors import ApiError
from gateway.inbox import Output, Started
from gateway.openai_fields import COMPLETIONS
from gateway.openai_logprobs import CompletionLogprobs
from gateway.openai_sse import Envelope, Frames, UsageWanted
from gateway.openai_types import CompletionRequest, invalid
from gateway.openai_usage import usage_body
from gateway.stream import stream

T = TypeVar("T")


async def completions(request: web.Request) -> web.StreamResponse:
    desk = request.app[DESK]
    body = await json_object(request, desk.config)
    request[IGNORED] = desk.note_ignored(COMPLETIONS.ignored(body))
    try:
        completion = CompletionRequest.model_validate(body)
    except ValidationError as e:
        raise invalid(e) from None
    model = desk.model(completion.model)
    requests = [replace(one, model=model.name) for one in completion.neutral()]
    envelope = Envelope(
        id=f"cmpl-{request[RECORD].id.removeprefix('req_')}",
        kind="text_completion",
        created=int(time.time()),
        model=model.shown,
        fingerprint=desk.fingerprint,
    )
    said_first = [one.prompt.text or "" if one.echo else "" for one in requests for _ in range(one.choices)]
    logprobs = [CompletionLogprobs(text) for text in said_first] if completion.logprobs is not None else []
    with answer(desk.link, request[RECORD], requests) as held:
        if completion.stream:
            timings = held.timings if completion.timings else None
            wanted = UsageWanted(at_end=completion.include_usage, in_every_chunk=completion.continuous_usage, timings=timings)
            chunks = CompletionChunks(envelope, wanted, held.choices, logprobs)
            return await _about_the_prompt(stream(request, held, chunks, desk.pace))
        choices = await _about_the_prompt(held.whole())
    answered = envelope.body([_whole(index, choice, logprobs) for index, choice in enumerate(choices)])
    answered["usage"] = usage_body(choice.usage for choice in choices if choice.usage is not None)
    if completion.timings:
        answered["timings"] = held.timings()
    return json_response(answered)


class CompletionChunks:
    def __init__(self, envelope: Envelope, wanted: UsageWanted, choices: int, logprobs: Sequence[CompletionLogprobs]) -> None:
        """`logprobs`: of each choice, or none."""
        self._frames = Frames(envelope, wanted, choices)
        self._logprobs = logprobs

    def opening(self) -> bytes:
        return self.keep_alive()

    def started(self, update: Started) -> None:
        self._frames.started(update)

    def output(self, update: Output) -> bytes:
        self._frames.count(update)
        row = update.row
        text = "".join(piece.text for piece in row.pieces)
        logprobs = self._logprobs[update.index].columns(row.logprobs) if self._logprobs and row.logprobs else None
        if not text and logprobs is None and row.finish is None:
            return b""
        return self._frames.chunk(_choice(update.index, text, row.finish, logprobs))

    def keep_alive(self) -> bytes:
        return self._frames.chunk(_choice(self._frames.unfinished, "", None, None))

    def closing(self) -> bytes:
        return self._frames.closing()

    def error(self, error: ApiError) -> bytes:
        return self._frames.error(_renamed(error))


async def _about_the_prompt(answered: Awaitable[T]) -> T:
    try:
        return await answered
    except ApiError as e:
        raise _renamed(e) from None


def _renamed(error: ApiError) -> ApiError:
    """An error names the field as the client wrote it."""
    if error.param == "messages":
        error.param = "prompt"
    return error


def _whole(index: int, choice: Choice, logprobs: Sequence[CompletionLogprobs]) -> dict[str, object]:
    columns = logprobs[index].columns(choice.logprobs) if logprobs else None
    return _choice(index, "".join(choice.text), choice.finish, columns)


def _choice(index: int, text: str, finish: str | None, logprobs: dict[str, object] | None) -> dict[str, object]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
