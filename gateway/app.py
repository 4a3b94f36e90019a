"""The HTTP application: routes, and what happens to every request before and after its handler."""

import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from gateway.auth import require_key
from gateway.cache import clear_cache, probe_cache
from gateway.desk import DESK, IGNORED, OTHER, RECORD, Desk
from gateway.errors import ApiError, error_response
from gateway.metrics import metrics
from gateway.models_control import apply_profile, load_model, unload_model
from gateway.models_status import models_status
from gateway.openai_chat import chat_completions
from gateway.openai_completions import completions
from gateway.openai_models import model, models
from gateway.origin import OriginRules, cors_headers
from gateway.presence import Presence
from gateway.status import api_status, health

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CORS = web.RequestKey("cors", dict[str, str])
PRESENCE = web.AppKey("presence", Presence)
CLIENT_IDS = ("x-request-id", "x-client-request-id")
"""Headers by which a client, or a proxy before it, calls a request; ours goes into the answer."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


def make_app(desk: Desk, presence: Presence) -> web.Application:
    app = web.Application(middlewares=[recorded, errors_as_json, guarded])
    app[DESK] = desk
    app[PRESENCE] = presence
    app.on_response_prepare.append(_add_headers)
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/chat/completions", chat_completions)
        app.router.add_post(f"{prefix}/completions", completions)
        app.router.add_get(f"{prefix}/models", models)
        app.router.add_get(f"{prefix}/models/status", models_status)  # before the next one, which would take it for an id
        app.router.add_get(f"{prefix}/models/{{id:.+}}", model)
        app.router.add_post(f"{prefix}/models/{{id:.+}}/load", load_model)
        app.router.add_post(f"{prefix}/models/{{id:.+}}/unload", unload_model)
        app.router.add_post(f"{prefix}/models/{{id:.+}}/apply", apply_profile)
    app.router.add_get("/health", health)
    app.router.add_get("/api/status", api_status)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/api/ssd-cache/clear", clear_cache)
    app.router.add_post("/api/cache/probe", probe_cache)
    return app


@web.middleware
async def recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id and keeps what becomes of it."""
    records = request.app[DESK].records
    called = next((request.headers[name] for name in CLIENT_IDS if name in request.headers), "")
    record = request[RECORD] = records.begin(request.method, request.path, called, _route(request))
    try:
        response = await handler(request)
        record.status = response.status
        if request.method not in _READS:
            await _sent(request, response)
        return response
    finally:
        records.handled(record)


async def _sent(request: web.Request, response: web.StreamResponse) -> None:
    """To its last byte: the record of a request is open until its client has been given everything."""
    with contextlib.suppress(ConnectionError):  # the client has left: the server finds that out once more by itself
        await response.prepare(request)
        await response.write_eof()


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The task boundary of one request: whatever goes wrong becomes a JSON body, or an aborted connection mid-stream."""
    try:
        async with request.app[PRESENCE].watched(request):
            return await handler(request)
    except ApiError as e:
        return _failed(request, e)
    except web.HTTPException as e:
        return _failed(request, _routing_error(request, e))
    except ConnectionError:
        raise  # the client has left
    except Exception:
        log.exception("%s %s %s failed", request[RECORD].id, request.method, request.path)
        if request.writer.output_size > 0:
            if request.transport is not None:
                request.transport.abort()
            raise
        error = ApiError(500, "server_error", "The gateway failed; its log has the details.", code="internal")
        return _failed(request, error)


def _route(request: web.Request) -> str:
    """The path with names for its variable parts; whatever is not a path of ours looks the same."""
    resource = request.match_info.route.resource
    return OTHER if resource is None else resource.canonical


def _failed(request: web.Request, error: ApiError) -> web.Response:
    request[RECORD].code = error.code or error.kind
    return error_response(error)


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Host, Origin, preflight, key: in this order, before any body is read."""
    rules = _rules(request)
    host = request.headers.get("Host")
    if not rules.host_allowed(host):
        raise _forbidden("This server does not answer to that host; the setting allowed_hosts can add it.", "host_not_allowed")
    origin = request.headers.get("Origin")
    if origin is not None:
        if rules.origin_allowed(origin, host):
            request[CORS] = cors_headers(origin, request.headers)
        elif request.method not in _READS:
            raise _forbidden("Pages of that origin may not call; the setting cors_origins can allow it.", "origin_not_allowed")
    if request.method == "OPTIONS":
        return web.Response(status=204)
    require_key(request, request.app[DESK].config.api_key)
    return await handler(request)


def _rules(request: web.Request) -> OriginRules:
    desk = request.app[DESK]
    local = request.transport.get_extra_info("sockname") if request.transport is not None else None
    own = {str(address) for address in (desk.feed.host, local[0] if local else None) if address}
    return OriginRules(frozenset(own), desk.config.allowed_hosts, desk.config.cors_origins)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams included. OpenAI's clients read the first name, Anthropic's the second."""
    if RECORD in request:
        response.headers["x-request-id"] = response.headers["request-id"] = request[RECORD].id
        request[RECORD].status = response.status
    if CORS in request:
        response.headers.update(request[CORS])
    if request.get(IGNORED):
        response.headers["x-omlxd-ignored"] = _header_list(request[IGNORED])


def _header_list(names: Sequence[str]) -> str:
    """Names are the client's: only what is safe in a header, and not more than a proxy takes."""
    return ", ".join(re.sub(r"[^\w.\-\[\]]", "?", name[:64], flags=re.ASCII) for name in names[:50])


def _routing_error(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        message = f"There is no {request.path} here."
    elif error.status == 405:
        message = f"{request.path} does not take {request.method}."
    else:
        message = error.reason
    answer = ApiError(error.status, "invalid_request_error", message, code="not_found" if error.status == 404 else None)
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, "invalid_request_error", message, code=code)
