"""Reads a request body as a JSON object: size limits, compressed bodies, and everything that is not JSON.

One thing that is not JSON is repaired: half an emoji. Agents cut tool results by UTF-16 units, and from then on every turn of
the session carries the same broken pair: refusing it would end the session.

The content type is not looked at: curl calls a body form-encoded unless told otherwise.
"""

import asyncio
import re
import time
import zlib
from typing import cast

import pydantic_core
from aiohttp import web

from gateway.config import GatewayConfig
from gateway.desk import RECORD
from gateway.errors import ApiError, InvalidRequest

SURROGATES = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
"""An escaped pair (then group 1 is there), or half of one. Most escapes are others, so it begins with what is found fastest."""


async def json_object(request: web.Request, config: GatewayConfig) -> dict[str, object]:
    """Raises `ApiError`: 413 over a limit, 400 for what is not a JSON object in UTF-8."""
    data = await _read(request, config.max_body_bytes)
    try:
        value = _parsed(data)
    except ValueError as e:
        raise InvalidRequest(f"The body is not valid JSON: {e}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body should be a JSON object.", code="invalid_json")
    if _text_bytes(cast(object, value), config.text_limit_bytes) > config.text_limit_bytes:
        raise _too_large(f"The request holds more than {config.text_limit_bytes} bytes of text.")
    return cast("dict[str, object]", value)


def _parsed(data: bytes) -> object:
    """Half a surrogate pair becomes U+FFFD, as in any program that reads such text. Raises ValueError."""
    try:
        return cast(object, pydantic_core.from_json(data, allow_inf_nan=False))
    except ValueError as e:
        if "hex escape" not in str(e):  # what else is wrong with a large body need not be looked through
            raise
    return cast(object, pydantic_core.from_json(SURROGATES.sub(_whole, data), allow_inf_nan=False))


def _whole(found: re.Match[bytes]) -> bytes:
    before = found.start()
    while before and found.string[before - 1] == ord("\\"):
        before -= 1
    if (found.start() - before) % 2:  # an escaped backslash, and then what only looks like an escape
        return found[0][:6] + (rb"\ufffd" if found[1] else b"")
    return found[0] if found[1] else rb"\ufffd"


async def _read(request: web.Request, limit_bytes: int) -> bytes:
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(f"The body is larger than {limit_bytes} bytes.")
    data = bytearray()
    async for block in request.content.iter_any():
        request[RECORD].moved_at = time.monotonic()
        data += block
        if len(data) > limit_bytes:
            raise _too_large(f"The body is larger than {limit_bytes} bytes.")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return bytes(data)
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, "invalid_request_error", f"Content-Encoding {encoding[:40]!r} is not supported: gzip or deflate.")
    return await asyncio.to_thread(_unpacked, bytes(data), limit_bytes)


def _unpacked(data: bytes, limit_bytes: int) -> bytes:
    """Not left to aiohttp: after a body that does not unpack it resets the connection before the client has read why."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # tells gzip from zlib by the header
    try:
        unpacked = unpacker.decompress(data, limit_bytes + 1)
    except zlib.error as e:
        raise InvalidRequest(f"The body cannot be unpacked: {e}.", code="invalid_body") from None
    if len(unpacked) > limit_bytes:
        raise _too_large(f"The body unpacks to more than {limit_bytes} bytes.")
    if not unpacker.eof:
        raise InvalidRequest("The packed body ends early.", code="invalid_body")
    return unpacked


def _text_bytes(value: object, enough_bytes: int) -> int:
    """The bytes of all strings in `value`, counted no further than needed; nesting is bounded by the parser."""
    if isinstance(value, str):
        return len(value.encode())
    total = 0
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        items = cast("list[object]", value)
    else:
        return 0
    for item in items:
        total += _text_bytes(item, enough_bytes)
        if total > enough_bytes:
            break
    return total


def _too_large(message: str) -> ApiError:
    return ApiError(413, "request_too_large", message, code="request_too_large")
