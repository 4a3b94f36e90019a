"""What every handler needs: the link, the feed and the settings of the moment, and the few counters the gateway keeps."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gateway.config import GatewayConfig
from gateway.control import Control
from gateway.errors import Failure, InvalidRequest, api_error, model_not_found
from gateway.feed import Feed
from gateway.link import Link
from gateway.records import Record, Records
from gateway.stream import Pace
from gateway.tallies import Tallies
from supervisor.protocol import Code

MAX_IGNORED_NAMES = 200
"""Clients choose the names: more than these are counted together."""
OTHER = "(other)"
STATUS_LIMIT_S = 3.0
"""A scraper gives up after ten by default; that a supervisor hangs is to be seen, not to be waited for."""


class Desk:
    def __init__(self, control: Control, link: Link, records: Records, tallies: Tallies) -> None:
        self.link = link
        self.records = records
        self.tallies = tallies
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
        return Pace(self.config.header_patience_s, self.config.keepalive_s or None)

    @property
    def fingerprint(self) -> str:
        return f"omlxd-{self.feed.version}"

    async def call(self, verb: str, args: Mapping[str, object]) -> dict[str, object]:
        """The result of one of the supervisor's admin verbs, or the `ApiError` that its refusal is."""
        reply = await self._control.call(verb, args)
        if not reply.ok:
            raise api_error(Failure(reply.code or Code.INTERNAL, reply.message or f"{verb} failed."))
        return reply.result

    async def status(self) -> dict[str, object]:
        """The server as it is now: what the supervisor says unasked is as old as a slot's last change of state.

        Raises ApiError, after three seconds at the latest.
        """
        try:
            async with asyncio.timeout(STATUS_LIMIT_S):
                return await self.call("status", {})
        except TimeoutError:
            raise api_error(Failure(Code.INTERNAL, f"The supervisor did not answer within {STATUS_LIMIT_S:g} s.")) from None

    def model(self, name: str | None) -> "Named":
        """What a request's model name, None for none, stands for. Nobody has to be asked about a model that is not there."""
        default, found = self.config.default_model, self.feed.find(name or "")
        if name and found is not None:
            return Named(name, name)
        if not name and default is None:
            raise InvalidRequest("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
        stand_in = self.feed.find(default) if default is not None and (not name or self.config.model_fallback) else None
        if default is None or stand_in is None:
            raise model_not_found(name or default or "")
        return Named(default, stand_in.id)

    def note_ignored(self, names: Sequence[str]) -> Sequence[str]:
        for name in names:
            known = name in self.ignored_fields or len(self.ignored_fields) < MAX_IGNORED_NAMES
            self.ignored_fields[name[:64] if known else OTHER] += 1
        return names


@dataclass(frozen=True, slots=True)
class Named:
    """What to acquire, and what the answer calls it: as the request did, but a stand-in always by its real id."""

    name: str
    shown: str


DESK = web.AppKey("desk", Desk)
RECORD = web.RequestKey("record", Record)
"""Of the request and its answers; its `id` is what the client gets as x-request-id."""
IGNORED = web.RequestKey("ignored", Sequence[str])


def json_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
