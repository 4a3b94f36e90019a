"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web
from pydantic import ValidationError

from gateway.answer import Choice, answer
from gateway.body import json_object
from gateway.desk import DESK, IGNORED, RECORD, Desk, json_response
from gateway.errors import ApiError
from gateway.inbox import Output, Started
from gateway.openai_fields import CHAT
from gateway.openai_logprobs import Entry, chat_logprobs
from gateway.openai_sse import Envelope, Frames, UsageWanted
from gateway.openai_types import ChatRequest, invalid
from gateway.openai_usage import usage_body
from gateway.stream import stream


async def chat_completions(request: web.Request) -> web.StreamResponse:
    desk = request.app[DESK]
    body = await json_object(request, desk.config)
    request[IGNORED] = desk.note_ignored(CHAT.ignored(body))
    try:
        chat = ChatRequest.model_validate(body)
    except ValidationError as e:
        raise invalid(e) from None
    model = desk.model(chat.model)
    envelope = _envelope(desk, request[RECORD].id, chat, model.shown)
    with answer(desk.link, request[RECORD], [replace(chat.neutral(), model=model.name)]) as held:
        if chat.stream:
            timings = held.timings if chat.timings else None
            wanted = UsageWanted(at_end=chat.include_usage, in_every_chunk=chat.continuous_usage, timings=timings)
            chunks = ChatChunks(envelope, wanted, held.choices, with_logprobs=bool(chat.logprobs))
            return await stream(request, held, chunks, desk.pace)
        body = _whole(envelope, await held.whole(), with_logprobs=bool(chat.logprobs))
        return json_response({**body, "timings": held.timings()} if chat.timings else body)


class ChatChunks:
    def __init__(self, envelope: Envelope, wanted: UsageWanted, choices: int, *, with_logprobs: bool) -> None:
        self._frames = Frames(envelope, wanted, choices)
        self._choices = choices
        self._with_logprobs = with_logprobs

    def opening(self) -> bytes:
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._choices))

    def started(self, update: Started) -> None:
        self._frames.started(update)

    def output(self, update: Output) -> bytes:
        self._frames.count(update)
        row = update.row
        deltas: list[dict[str, object]] = [
            {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text} for piece in row.pieces if piece.text
        ]
        entries = row.logprobs if self._with_logprobs else None
        if entries and not deltas:  # a token whose text is held back is none the less reported
            deltas = [{"content": ""}]
        events = [self._delta(update.index, delta, entries if at == 0 else None) for at, delta in enumerate(deltas)]
        if row.finish is not None:
            events.append(self._delta(update.index, {}, finish=row.finish))
        return b"".join(events)

    def keep_alive(self) -> bytes:
        """A comment would not do: some clients' idle timers do not count it."""
        return self._delta(self._frames.unfinished, {"content": ""})

    def closing(self) -> bytes:
        return self._frames.closing()

    def error(self, error: ApiError) -> bytes:
        return self._frames.error(error)

    def _delta(
        self, index: int, delta: dict[str, object], entries: Sequence[Entry] | None = None, finish: str | None = None
    ) -> bytes:
        logprobs = chat_logprobs(entries) if entries else None
        return self._frames.chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})


def _envelope(desk: Desk, request_id: str, chat: ChatRequest, model: str) -> Envelope:
    return Envelope(
        id=f"chatcmpl-{request_id.removeprefix('req_')}",
        kind="chat.completion.chunk" if chat.stream else "chat.completion",
        created=int(time.time()),
        model=model,
        fingerprint=desk.fingerprint,
    )


def _whole(envelope: Envelope, choices: list[Choice], *, with_logprobs: bool) -> dict[str, object]:
    body = envelope.body([_choice(index, choice, with_logprobs=with_logprobs) for index, choice in enumerate(choices)])
    body["usage"] = usage_body(choice.usage for choice in choices if choice.usage is not None)
    return body


def _choice(index: int, choice: Choice, *, with_logprobs: bool) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": "".join(choice.text), "refusal": None, "annotations": []}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    logprobs = chat_logprobs(choice.logprobs) if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
