"""The verb `cache_explain`: asks every worker about a request and answers with what they remember of it.

Only the worker that served a request knows, and its id does not say which one that was.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from supervisor.fleet import Fleet
from supervisor.protocol import Call, Code, Explain, Explained, Message, Reply

PATIENCE_S = 2.0
"""A worker answers at once, whatever its engine is at; one that is dying does not answer at all."""


class ExplainingShell(Protocol):
    fleet: Fleet

    def send(self, identity: bytes, message: Message) -> bool: ...


@dataclass(slots=True, eq=False)
class Question:
    who: bytes
    call: str
    rid: str
    unheard: set[bytes]
    lines: list[str] = field(default_factory=list[str])
    timer: asyncio.TimerHandle | None = None


class Explaining:
    def __init__(self, shell: ExplainingShell) -> None:
        self._shell = shell
        self._open: list[Question] = []

    def ask(self, who: bytes, call: Call) -> None:
        rid = str(call.args.get("rid", ""))
        asked = {worker for worker in self._shell.fleet.ready() if self._shell.send(worker, Explain(rid=rid))}
        question = Question(who, call.id, rid, asked)
        self._open.append(question)
        question.timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._answer, question)
        if not asked:
            self._answer(question)

    def take(self, worker: bytes, message: Explained) -> None:
        for question in [q for q in self._open if q.rid == message.rid and worker in q.unheard]:
            question.unheard.discard(worker)
            question.lines += message.lines
            if not question.unheard:
                self._answer(question)

    def _answer(self, question: Question) -> None:
        self._open.remove(question)
        if question.timer is not None:
            question.timer.cancel()
        if question.lines:
            reply = Reply(id=question.call, ok=True, result={"lines": question.lines})
        else:
            text = f"no loaded model remembers a request {question.rid!r}: each knows its last 200, as long as it is loaded"
            reply = Reply(id=question.call, ok=False, code=Code.NOT_FOUND, message=text)
        self._shell.send(question.who, reply)
