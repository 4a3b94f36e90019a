"""GET /v1/models and /v1/models/{id}: one object that satisfies both OpenAI's and Anthropic's clients."""

from datetime import UTC, datetime

from aiohttp import web

from gateway.desk import DESK, json_response
from gateway.errors import model_not_found
from supervisor.protocol import SlotStatus


async def models(request: web.Request) -> web.Response:
    """Each model, and after it its profiles, which clients choose like models of their own."""
    usable = [slot for slot in request.app[DESK].feed.models if slot.usable]
    names = [(name, slot) for slot in usable for name in (slot.id, *(f"{slot.id}:{profile}" for profile in slot.profiles))]
    return json_response(
        {
            "object": "list",
            "data": [_model(name, slot) for name, slot in names],
            "first_id": names[0][0] if names else None,
            "last_id": names[-1][0] if names else None,
            "has_more": False,
        }
    )


async def model(request: web.Request) -> web.Response:
    """By id, alias, or either with a profile; ids hold slashes, plain or as %2F."""
    name = request.match_info["id"]
    slot = request.app[DESK].feed.find(name)
    if slot is None or not slot.usable:
        raise model_not_found(name)
    profile = name.rpartition(":")[2]
    is_profile = name not in (slot.id, *slot.aliases) and profile in slot.profiles
    return json_response(_model(f"{slot.id}:{profile}" if is_profile else slot.id, slot))


def _model(name: str, slot: SlotStatus) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(slot.created),
        "owned_by": "omlxd",
        "type": "model",
        "display_name": name,
        "aliases": slot.aliases,
        "root": slot.id,
        "parent": slot.base,
        "created_at": datetime.fromtimestamp(slot.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "context_length": slot.context,
        "max_model_len": slot.context,
        "max_input_tokens": slot.context,
        "max_tokens": slot.max_tokens or slot.context,
    }
