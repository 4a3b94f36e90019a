"""Does a request carry the API key? Every place where some client SDK puts one is looked at.

One Anthropic SDK sends a bearer token and its predecessor `x-api-key`; Google's send a header or a query parameter. Any that
matches will do, and one that does not never appears in a message or a log line.
"""

import hmac
from collections.abc import Iterator

from aiohttp import web

from gateway.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
"""Served without a key, so that a load balancer or a benchmark can ask whether anyone is there."""


def require_key(request: web.Request, api_key: str | None) -> None:
    """Raises a 401 `ApiError` unless no key is configured, the path is open, or the right key came with the request."""
    if not api_key or request.path in OPEN_PATHS:
        return
    expected = api_key.encode()
    offered = list(_offered(request))
    if any(hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected) for key in offered):
        return
    message = "Incorrect API key provided." if offered else "You didn't provide an API key: send Authorization: Bearer KEY."
    error = ApiError(401, "authentication_error", message, code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    raise error


def _offered(request: web.Request) -> Iterator[str]:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    for header in ("x-api-key", "x-goog-api-key"):
        if key := request.headers.get(header):
            yield key
    if key := request.query.get("key"):
        yield key
