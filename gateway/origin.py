"""Which Host and Origin headers may talk to this server, and the CORS headers that say so.

A web page can make a browser send requests to a loopback port, directly or through a host name that resolves to 127.0.0.1
(DNS rebinding). So the Host must be one we answer to, and a page's Origin must be loopback or listed. Pure: no sockets here.
"""

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

EXPOSED = "x-request-id, request-id, x-omlxd-ignored, retry-after"
METHODS = "GET, HEAD, POST, OPTIONS"


@dataclass(frozen=True, slots=True)
class OriginRules:
    own_addresses: frozenset[str]
    """What the server is bound to and the local address of this very connection."""
    allowed_hosts: Collection[str]
    cors_origins: Collection[str]

    def host_allowed(self, host_header: str | None) -> bool:
        """Absent is allowed: a browser always sends one."""
        if host_header is None or "*" in self.allowed_hosts:
            return True
        name = _host_name(f"//{host_header}")
        if name is None:
            return False
        return is_loopback(name) or name in self.own_addresses or name in {h.lower().rstrip(".") for h in self.allowed_hosts}

    def origin_allowed(self, origin: str, host_header: str | None) -> bool:
        """Loopback pages, listed ones, and pages served under the same host and port as the request."""
        if "*" in self.cors_origins or origin in self.cors_origins:
            return True
        if not origin.startswith(("http://", "https://")):
            return False  # "null" and application schemes have to be listed
        name = _host_name(origin)
        return name is not None and (is_loopback(name) or origin.partition("://")[2] == host_header)


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def cors_headers(origin: str, asked: Mapping[str, str]) -> dict[str, str]:
    """For an allowed origin; `asked` are the request's headers, echoed for a preflight."""
    headers = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}
    if "Access-Control-Request-Method" in asked:
        headers["Access-Control-Allow-Methods"] = METHODS
        headers["Access-Control-Allow-Headers"] = asked.get("Access-Control-Request-Headers", "*")
        headers["Access-Control-Max-Age"] = "600"
    if asked.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers


def _host_name(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is not a number
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username or not parts.hostname:
        return None
    return parts.hostname.rstrip(".")
