"""What every handler needs: the link, the feed and the settings of the moment, and the few counters the gateway keeps."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from gateway.config import GatewayConfig
from gateway.control import Control
from gateway.errors import Failure, api_error, model_not_found
from gateway.feed import Feed
from gateway.link import Link
from gateway.stream import Pace
from supervisor.protocol import Code

MAX_IGNORED_NAMES = 200
"""Clients choose the names: more than these are counted together."""
OTHER = "(other)"


class Desk:
    def __init__(self, control: Control, link: Link) -> None:
        self.link = link
        self.ignored_fields: Counter[str] = Counter()
        self._control = control

    @property
    def config(self) -> GatewayConfig:
        return self._control.config

    @property
    def feed(self) -> Feed:
        return self._control.feed

    @property
    def identity(self) -> str:
        return self._control.identity

    @property
    def pace(self) -> Pace:
        return Pace(self.config.header_patience_s, self.config.keepalive_s)

    @property
    def fingerprint(self) -> str:
        return f"omlxd-{self.feed.version}"

    async def call(self, verb: str, args: Mapping[str, object]) -> dict[str, object]:
        """The result of one of the supervisor's admin verbs, or the `ApiError` that its refusal is."""
        reply = await self._control.call(verb, args)
        if not reply.ok:
            raise api_error(Failure(reply.code or Code.INTERNAL, reply.message or f"{verb} failed."))
        return reply.result

    def require_model(self, name: str) -> None:
        """Nobody has to be asked about a model that is not there."""
        if self.feed.find(name) is None:
            raise model_not_found(name)

    def note_ignored(self, names: Sequence[str]) -> Sequence[str]:
        for name in names:
            known = name in self.ignored_fields or len(self.ignored_fields) < MAX_IGNORED_NAMES
            self.ignored_fields[name[:64] if known else OTHER] += 1
        return names


DESK = web.AppKey("desk", Desk)
REQUEST_ID = web.RequestKey("request_id", str)
IGNORED = web.RequestKey("ignored", Sequence[str])


def json_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
