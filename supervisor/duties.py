"""Which attendants there are, how each is started, and what each is told when it reports. Pure but for the disk's size."""

import sys
from collections.abc import Callable, Sequence

from supervisor import ipc
from supervisor.attendants import Duty
from supervisor.paths import Paths
from supervisor.protocol import Assign
from supervisor.settings import Settings
from supervisor.store_limits import store_limits

JANITOR_INTERVAL_S = 5.0

Command = Callable[[str, str, int], Sequence[str]]


def duties(settings: Settings, paths: Paths, http_fd: int, janitor_said: Callable[[bytes], None]) -> list[Duty]:
    control, level = ipc.endpoint(paths.control), settings.server.log_level
    found = [
        Duty("gateway", "g", _child("gateway", control, level, "--http-fd", str(http_fd)), fds=(http_fd,), indispensable=True),
        Duty("text", "t", _child("worker", control, level)),
    ]
    if settings.cache.enabled and not settings.cache.hot_cache_only:
        found.append(Duty("janitor", "j", _janitor(settings, paths), greets=False, on_output=janitor_said))
    return found


def assignment(duty: Duty, settings: Settings, paths: Paths) -> Assign:
    """A second one may follow when settings change that take effect at once."""
    given: dict[str, object] = {}
    if duty.name == "gateway":
        given = {
            "log_level": settings.server.log_level,
            "api_key": settings.auth.api_key,
            "cors_origins": list(settings.server.cors_origins),
            "allowed_hosts": list(settings.server.allowed_hosts),
            "default_model": settings.model.default,
            "model_fallback": settings.model.fallback,
            "header_patience_s": settings.server.header_patience_s,
            "keepalive_s": settings.server.keepalive_s,
        }
    elif duty.name == "text":
        cache = settings.cache
        given = {"volatile_headers": list(cache.volatile_headers), "volatile_markers": list(cache.volatile_markers)}
    return Assign(kind=duty.name, gen=0, data_endpoints=[ipc.endpoint(paths.data)], settings=given)


def _child(module: str, control: str, log_level: str, *more: str) -> Command:
    def command(identity: str, nonce: str, lifeline: int) -> Sequence[str]:
        head = [sys.executable, "-P", "-m", module, "--control", control]
        tail = ["--lifeline-fd", str(lifeline), "--log-level", log_level, *more]
        return [*head, "--identity", identity, "--nonce", nonce, *tail]

    return command


def _janitor(settings: Settings, paths: Paths) -> Command:
    def command(_identity: str, _nonce: str, lifeline: int) -> Sequence[str]:
        limits = store_limits(settings, paths)
        return [
            *(sys.executable, "-P", "-m", "cachestore.evict", "--root", str(paths.cache)),
            *("--max-bytes", str(limits.high_bytes), "--min-free-bytes", str(limits.min_free_bytes)),
            *("--interval", str(JANITOR_INTERVAL_S)),
            *("--lifeline-fd", str(lifeline)),
        ]

    return command
