"""GET /v1/models/status: what clients made for oMLX ask for, and what of the prefix cache each model has, or why none."""

from aiohttp import web

from gateway.desk import DESK, json_response
from gateway.feed import READY
from supervisor.protocol import SlotStatus


async def models_status(request: web.Request) -> web.Response:
    return json_response({"models": [_model(slot) for slot in request.app[DESK].feed.models if slot.usable]})


def _model(slot: SlotStatus) -> dict[str, object]:
    return {
        "id": slot.id,
        "model_type": "llm",
        "engine_type": "batched",
        "is_helper": False,
        "hidden": False,
        "loaded": slot.state == READY,
        "state": slot.state,
        "max_context_window": slot.context,
        "max_tokens": slot.max_tokens or slot.context,
        "cache": slot.cache,
    }
