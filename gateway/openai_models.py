"""GET /v1/models and /v1/models/{id}: one object that satisfies both OpenAI's and Anthropic's clients."""

from datetime import UTC, datetime

from aiohttp import web

from gateway.desk import DESK, json_response
from gateway.errors import model_not_found
from supervisor.protocol import SlotStatus


async def models(request: web.Request) -> web.Response:
    usable = [slot for slot in request.app[DESK].feed.models if slot.usable]
    return json_response(
        {
            "object": "list",
            "data": [_model(slot) for slot in usable],
            "first_id": usable[0].id if usable else None,
            "last_id": usable[-1].id if usable else None,
            "has_more": False,
        }
    )


async def model(request: web.Request) -> web.Response:
    """By id or alias; ids hold slashes, plain or as %2F."""
    name = request.match_info["id"]
    slot = request.app[DESK].feed.find(name)
    if slot is None or not slot.usable:
        raise model_not_found(name)
    return json_response(_model(slot))


def _model(slot: SlotStatus) -> dict[str, object]:
    return {
        "id": slot.id,
        "object": "model",
        "created": int(slot.created),
        "owned_by": "omlxd",
        "type": "model",
        "display_name": slot.id,
        "created_at": datetime.fromtimestamp(slot.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "context_length": slot.context,
        "max_model_len": slot.context,
        "max_input_tokens": slot.context,
        "max_tokens": slot.max_tokens or slot.context,
    }
