"""The verb `trace`: asks the gateway where a request's time went. It alone knows, and a request outlives no gateway."""

import asyncio
from typing import Protocol

from supervisor.protocol import Call, Code, Message, Reply, Trace, Traced
from supervisor.staff import GATEWAY, Staff

PATIENCE_S = 2.0
"""A gateway answers within one turn of its loop; one that is being restarted does not answer."""
UNKNOWN = "no request {!r} is remembered: the gateway knows the last 1000, as long as it runs"


class TracingShell(Protocol):
    @property
    def staff(self) -> Staff: ...

    def send(self, identity: bytes, message: Message) -> bool: ...


class Tracing:
    def __init__(self, shell: TracingShell) -> None:
        self._shell = shell
        self._asked: dict[str, tuple[bytes, Call, asyncio.TimerHandle]] = {}
        self._numbers = 0

    def ask(self, who: bytes, call: Call) -> None:
        self._numbers += 1
        number = str(self._numbers)
        if not self._shell.send(self._shell.staff.identity(GATEWAY), Trace(call=number, rid=str(call.args.get("rid", "")))):
            self._answer(who, call, None)
            return
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._unheard, number)
        self._asked[number] = (who, call, timer)

    def take(self, message: Traced) -> None:
        if (asked := self._asked.pop(message.call, None)) is not None:
            who, call, timer = asked
            timer.cancel()
            self._answer(who, call, message.requests)

    def _unheard(self, number: str) -> None:
        who, call, _ = self._asked.pop(number)
        self._answer(who, call, None)

    def _answer(self, who: bytes, call: Call, requests: list[dict[str, object]] | None) -> None:
        if requests is None:
            reply = Reply(id=call.id, ok=False, code=Code.BUSY, message="the gateway does not answer; it may be starting")
        elif not requests:
            message = UNKNOWN.format(call.args.get("rid", ""))
            reply = Reply(id=call.id, ok=False, code=Code.NOT_FOUND, message=message)
        else:
            reply = Reply(id=call.id, ok=True, result={"requests": requests})
        self._shell.send(who, reply)
