"""Reads a request body as a JSON object: size limits, compressed bodies, and everything that is not JSON.

The content type is not looked at: curl calls a body form-encoded unless told otherwise.
"""

from typing import cast

import pydantic_core
from aiohttp import web

from gateway.config import GatewayConfig
from gateway.errors import ApiError, InvalidRequest


async def json_object(request: web.Request, config: GatewayConfig) -> dict[str, object]:
    """Raises `ApiError`: 413 over a limit, 400 for what is not a JSON object in UTF-8."""
    data = await _read(request, config.max_body_bytes)
    try:
        value = cast(object, pydantic_core.from_json(data, allow_inf_nan=False))
    except ValueError as e:
        raise InvalidRequest(f"The body is not valid JSON: {e}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body should be a JSON object.", code="invalid_json")
    if _text_bytes(cast(object, value), config.text_limit_bytes) > config.text_limit_bytes:
        raise _too_large(f"The request holds more than {config.text_limit_bytes} bytes of text.")
    return cast("dict[str, object]", value)


async def _read(request: web.Request, limit_bytes: int) -> bytes:
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(f"The body is larger than {limit_bytes} bytes.")
    data = bytearray()
    try:
        async for block in request.content.iter_any():
            data += block
            if len(data) > limit_bytes:  # counted after decompression
                raise _too_large(f"The body is larger than {limit_bytes} bytes.")
    except web.RequestPayloadError as e:
        raise InvalidRequest(f"The body cannot be read: {e}.", code="invalid_body") from None
    return bytes(data)


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
