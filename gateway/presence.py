"""Notices clients that left while their connection's reading is paused.

aiohttp cancels a handler when the connection is lost, but with a pipelined request waiting unread it does not read on, so the
loop never sees the end. The kernel does: it is asked every few seconds.
"""

import asyncio
import select
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

PROBE_EVERY_S = 5.0
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # macOS reports the half-close as POLLHUP


class Presence:
    def __init__(self) -> None:
        self._transports: set[asyncio.Transport] = set()

    @asynccontextmanager
    async def watched(self, request: web.Request) -> AsyncGenerator[None]:
        transport = request.transport
        if transport is None:
            yield
            return
        self._transports.add(transport)
        try:
            yield
        finally:
            self._transports.discard(transport)

    async def probe_forever(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            for transport in list(self._transports):
                if _has_left(transport):
                    transport.abort()  # the handler is cancelled by the lost connection


def _has_left(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), _GONE)
    return bool(poll.poll(0))
