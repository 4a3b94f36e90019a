"""POST /api/ssd-cache/clear and POST /api/cache/probe: empty the block store, and ask what of a prompt is cached."""

from dataclasses import replace
from typing import cast

from aiohttp import web
from pydantic import ValidationError

from gateway.answer import answer
from gateway.body import json_object
from gateway.desk import DESK, RECORD, json_response
from gateway.errors import ApiError, InvalidRequest, api_error
from gateway.feed import READY
from gateway.inbox import Answered, Failed
from gateway.openai_types import ChatRequest, CompletionRequest, invalid
from gateway.request import GenerateRequest


async def clear_cache(request: web.Request) -> web.Response:
    """The body may be missing: all models then. Answers when the files are gone."""
    desk = request.app[DESK]
    body = await json_object(request, desk.config) if request.body_exists else {}
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("Invalid 'model': a string is expected.", param="model", code="invalid_type")
    report = await desk.call("cache_clear", {"model": model})
    files = cast("dict[str, int]", report.get("deleted_files") or {})
    cleared = {"status": "ok", "model": model, "deleted_files": sum(files.values()), "deleted_bytes": report["deleted_bytes"]}
    return json_response(cleared)


async def probe_cache(request: web.Request) -> web.Response:
    """The body is that of a chat or text completion; nothing is generated, and no model is loaded for it."""
    desk = request.app[DESK]
    asked = _asked(await json_object(request, desk.config))
    model = desk.model(asked.model)
    slot = desk.feed.find(model.name)
    if slot is not None and slot.state != READY:
        message = f"{slot.id} is not loaded, and only its worker knows its cache; load it first: omlxctl load {slot.id}"
        raise ApiError(409, "invalid_request_error", message, code="model_not_loaded", param="model")
    with answer(desk.link, request[RECORD], [replace(asked, model=model.name, probe=True)]) as held:
        while True:
            for update in await held.take():
                if isinstance(update, Failed):
                    raise api_error(update.failure)
                if isinstance(update, Answered):
                    return json_response(_probed(model.shown, cast("dict[str, int]", update.data)))


def _asked(body: dict[str, object]) -> GenerateRequest:
    try:
        if "messages" in body:
            return ChatRequest.model_validate(body).neutral()
        prompts = CompletionRequest.model_validate(body).neutral()
    except ValidationError as e:
        raise invalid(e) from None
    if len(prompts) != 1:
        raise InvalidRequest("Invalid 'prompt': one prompt at a time.", param="prompt", code="invalid_value")
    return prompts[0]


def _probed(model: str, counted: dict[str, int]) -> dict[str, object]:
    hot, cold = counted["hot"], counted["cold"]
    missing = counted["prompt_tokens"] - hot - cold
    return {"model": model, "prompt_tokens": counted["prompt_tokens"], "hot": hot, "cold": cold, "missing": missing}
