"""Every outcome that is not an answer, turned into an HTTP status and an OpenAI error body: the one place for it.

The status decides how often clients repeat: one 503 makes some agents send thirty requests, a 400 exactly one. So whatever
will fail again is a 400, and 5xx is for what the next try may well survive.
"""

import math
from dataclasses import dataclass

import msgspec
from aiohttp import web

from supervisor.protocol import Code


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    type: str
    retry_after_s: float | None = None
    should_retry: bool | None = None
    param: str | None = None


NAME_SHOWN_CHARS = 200
"""Of a model name in a message: names are the client's, and may be as long as a body."""
_INVALID = "invalid_request_error"
_BUSY = "rate_limit_error"
_SERVER = "server_error"

OUTCOMES: dict[str, Outcome] = {
    Code.MODEL_NOT_FOUND: Outcome(404, _INVALID, param="model"),
    Code.NOT_FOUND: Outcome(404, _INVALID),
    Code.NOT_ALLOWED: Outcome(403, _INVALID),
    Code.CONTEXT_LENGTH_EXCEEDED: Outcome(400, _INVALID, param="messages"),
    Code.BAD_REQUEST: Outcome(400, _INVALID),
    "settings_invalid": Outcome(400, _INVALID),
    "not_found": Outcome(404, _INVALID),
    Code.BAD_SCHEMA: Outcome(400, _INVALID, param="response_format"),
    Code.TEMPLATE_ERROR: Outcome(400, _INVALID, param="messages"),
    Code.UNSUPPORTED: Outcome(400, _INVALID),
    Code.MODEL_TOO_LARGE: Outcome(400, _INVALID, param="model"),
    Code.KV_TOO_LARGE: Outcome(400, _INVALID),
    Code.MODEL_UNLOADABLE: Outcome(400, _INVALID, param="model"),
    Code.POISON: Outcome(400, _INVALID),
    Code.QUEUE_FULL: Outcome(429, _BUSY, retry_after_s=1),
    Code.BUSY: Outcome(429, _BUSY, retry_after_s=1),
    Code.MODEL_FAILED: Outcome(503, _SERVER, retry_after_s=30, should_retry=False),
    Code.MODEL_UNLOADED: Outcome(503, _SERVER, retry_after_s=1),
    Code.WORKER_LOST: Outcome(503, _SERVER),
    Code.OUT_OF_MEMORY: Outcome(503, _SERVER),
    Code.GPU_FAULT: Outcome(503, _SERVER, retry_after_s=1),
    Code.SHUTTING_DOWN: Outcome(503, _SERVER),
    Code.CANCELLED: Outcome(503, _SERVER),
    Code.VERSION_MISMATCH: Outcome(503, _SERVER, retry_after_s=5),
    Code.DEADLINE: Outcome(504, _SERVER),
    Code.INTERNAL: Outcome(500, _SERVER),
    Code.UNKNOWN_KIND: Outcome(500, _SERVER),
}


class ApiError(Exception):
    """A request ends with this status and body; `code` and `param` are null in the body when None."""

    def __init__(self, status: int, kind: str, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {}


class InvalidRequest(ApiError):
    """400: the request itself is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, _INVALID, message, code=code, param=param)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer did not come or ended early, as the supervisor or a worker named it."""

    code: str
    message: str
    retry_after_s: float | None = None


def api_error(failure: Failure) -> ApiError:
    """The HTTP form of a failure; a code this build does not know is a 500 that still shows it."""
    outcome = OUTCOMES.get(failure.code, Outcome(500, _SERVER))
    error = ApiError(outcome.status, outcome.type, failure.message, code=failure.code, param=outcome.param)
    wait_s = failure.retry_after_s if failure.retry_after_s is not None else outcome.retry_after_s
    if wait_s is not None:
        error.headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    if outcome.should_retry is not None:
        error.headers["x-should-retry"] = "true" if outcome.should_retry else "false"
    return error


def error_body(error: ApiError) -> dict[str, object]:
    """OpenAI's shape; all four keys are required by its specification."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=msgspec.json.encode(error_body(error)), content_type="application/json", headers=error.headers
    )


def model_not_found(name: str) -> ApiError:
    shown = name if len(name) <= NAME_SHOWN_CHARS else f"{name[:NAME_SHOWN_CHARS]}…"
    return api_error(Failure(Code.MODEL_NOT_FOUND, f"The model {shown!r} does not exist; GET /v1/models lists those that do."))
