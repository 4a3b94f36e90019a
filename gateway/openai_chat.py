"""POST /v1/chat/completions."""

import time

from aiohttp import web
from pydantic import ValidationError

from gateway.answer import Choice, answer
from gateway.body import json_object
from gateway.desk import DESK, IGNORED, REQUEST_ID, Desk, json_response
from gateway.errors import ApiError
from gateway.inbox import Output, Started
from gateway.openai_fields import CHAT
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
    desk.require_model(chat.model)
    envelope = _envelope(desk, request[REQUEST_ID], chat)
    with answer(desk.link, request[REQUEST_ID], [chat.neutral()]) as held:
        if chat.stream:
            wanted = UsageWanted(at_end=chat.include_usage, in_every_chunk=chat.continuous_usage)
            return await stream(request, held, ChatChunks(envelope, wanted), desk.pace)
        return json_response(_whole(envelope, await held.whole()))


class ChatChunks:
    def __init__(self, envelope: Envelope, wanted: UsageWanted) -> None:
        self._frames = Frames(envelope, wanted)

    def opening(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def started(self, update: Started) -> None:
        self._frames.started(update)

    def output(self, update: Output) -> bytes:
        self._frames.count(update)
        row = update.row
        events = [
            self._delta({"reasoning_content" if piece.kind == "reasoning" else "content": piece.text})
            for piece in row.pieces
            if piece.text
        ]
        if row.finish is not None:
            events.append(self._delta({}, row.finish))
        return b"".join(events)

    def keep_alive(self) -> bytes:
        """A comment would not do: some clients' idle timers do not count it."""
        return self._delta({"content": ""})

    def closing(self) -> bytes:
        return self._frames.closing()

    def error(self, error: ApiError) -> bytes:
        return self._frames.error(error)

    def _delta(self, delta: dict[str, object], finish: str | None = None) -> bytes:
        return self._frames.chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish})


def _envelope(desk: Desk, request_id: str, chat: ChatRequest) -> Envelope:
    return Envelope(
        id=f"chatcmpl-{request_id.removeprefix('req_')}",
        kind="chat.completion.chunk" if chat.stream else "chat.completion",
        created=int(time.time()),
        model=chat.model,
        fingerprint=desk.fingerprint,
    )


def _whole(envelope: Envelope, choices: list[Choice]) -> dict[str, object]:
    body = envelope.body([_choice(index, choice) for index, choice in enumerate(choices)])
    body["usage"] = usage_body(choice.usage for choice in choices if choice.usage is not None)
    return body


def _choice(index: int, choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": "".join(choice.text), "refusal": None, "annotations": []}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish}
