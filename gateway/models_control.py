"""POST /v1/models/{id}/load, /unload and /apply: what omlxctl can do with a model, by HTTP."""

from aiohttp import web

from gateway.body import json_object
from gateway.desk import DESK, json_response
from gateway.errors import InvalidRequest


async def load_model(request: web.Request) -> web.Response:
    """Answers when the model is ready. The same load as by omlxctl or for a first request."""
    result = await request.app[DESK].call("load", {"model": request.match_info["id"]})
    return json_response({"status": "ok", "model_id": result["model"], "load_s": result["load_s"]})


async def unload_model(request: web.Request) -> web.Response:
    """Running requests finish first, for 30 s at most."""
    result = await request.app[DESK].call("unload", {"model": request.match_info["id"]})
    return json_response({"status": "ok", "model_id": result["model"]})


async def apply_profile(request: web.Request) -> web.Response:
    """The body names the profile, or null for the model's own defaults; it may be missing if the id is `model:profile`."""
    desk = request.app[DESK]
    body = await json_object(request, desk.config) if request.body_exists else {}
    profile = body.get("profile", "")
    if profile is not None and not isinstance(profile, str):
        raise InvalidRequest("Invalid 'profile': a string or null is expected.", param="profile", code="invalid_type")
    args: dict[str, object] = {"model": request.match_info["id"]}
    if "profile" in body:
        args["profile"] = profile or ""
    result = await desk.call("apply", args)
    return json_response({"status": "ok", "model_id": result["model"], "profile": result["profile"]})
