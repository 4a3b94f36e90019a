"""The settings the gateway honours, as the supervisor hands them over in `assign`.

The supervisor has validated them against the settings tree; here they get their types and the defaults of a bare start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    api_key: str | None = None
    """None or empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call, besides loopback ones; "*" is any."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names this server answers to, besides loopback names and its own address; "*" is any."""
    header_patience_s: float = 5.0
    """A stream's status is sent after this long even if the worker has not accepted the request yet."""
    keepalive_s: float = 10.0
    """Longest silence on a stream, the strictest client seen gives up after 300 s; 0: any."""
    default_model: str | None = None
    """What a request that names no model gets."""
    model_fallback: bool = False
    """Whether one that names an unknown model gets it too."""
    max_body_bytes: int = 64 << 20
    text_limit_bytes: int = 16 << 20


def gateway_config(settings: Mapping[str, object]) -> GatewayConfig:
    """Reads the keys it knows and ignores the others; raises `msgspec.ValidationError` naming the key."""
    return msgspec.convert(dict(settings), GatewayConfig)
