"""GET /health, for whoever asks whether anyone is there, and GET /api/status, for whoever wants to know more."""

from aiohttp import web

from gateway.desk import DESK, json_response
from gateway.feed import READY


async def health(request: web.Request) -> web.Response:
    feed = request.app[DESK].feed
    loaded = sum(slot.state == READY for slot in feed.models)
    return json_response({"status": "ok", "version": feed.version, "models": len(feed.models), "models_loaded": loaded})


async def api_status(request: web.Request) -> web.Response:
    desk = request.app[DESK]
    server = await desk.status()
    gateway = {
        "identity": desk.identity,
        "requests": len(list(desk.records.open)),
        "inflight": desk.link.inflight,
        "ignored_fields": dict(desk.ignored_fields),
    }
    return json_response({**server, "gateway": gateway})
