"""The verbs for operators: another process for a duty, what everybody is doing at this moment, and what they have printed."""

import asyncio
import logging
import sys
import threading
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from supervisor.admin_reply import Answers, Refused
from supervisor.protocol import Call, Code, plain

if TYPE_CHECKING:
    from supervisor.shell import Supervisor

log = logging.getLogger("dump")


class Operate:
    def __init__(self, supervisor: "Supervisor", answers: Answers) -> None:
        self._supervisor = supervisor
        self._answers = answers
        self._renewing: set[asyncio.Task[None]] = set()

    def restart_attendant(self, who: bytes, call: Call, name: str) -> None:
        task = asyncio.create_task(self._renew(who, call, name))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(self, who: bytes, call: Call, name: str) -> None:
        pid = await self._supervisor.staff.renew(name)
        if pid is None:
            self._answers.refuse(who, call, Code.INTERNAL, f"{name} does not come up again; see: omlxctl logs {name}")
        else:
            self._answers.reply(who, call, {"name": name, "pid": pid})

    def dump(self, who: bytes, call: Call) -> None:
        """Stacks go to the logs: a process that hangs writes its own, which is why they cannot be part of the answer."""
        supervisor = self._supervisor
        asked = [name for name, attendant in supervisor.staff.attendants.items() if attendant.dump_stacks()]
        asked += supervisor.fleet.dump_all_stacks()
        log.warning("stacks of all threads and tasks\n%s", own_stacks())
        budget = supervisor.machine.budget()
        self._answers.reply(
            who,
            call,
            {
                "status": cast("dict[str, object]", plain(supervisor.status())),
                "slots": [asdict(view) for view in supervisor.machine.view()],
                "budget": {"budget_bytes": budget.budget_bytes, "charged_bytes": budget.charged_bytes},
                "next_deadline_in_s": supervisor.next_deadline_in_s(),
                "events": supervisor.feed.seq,
                "stacks_in_logs": ["omlxd", *asked],
            },
        )

    def logs(self, who: bytes, call: Call) -> None:
        name = str(call.args.get("name", ""))
        book = self._supervisor.books.get(name)
        if book is None:
            named = self._supervisor.roster.named(name)
            if named is None:
                raise Refused(Code.MODEL_NOT_FOUND, f"{name} is neither a model nor a process of this server")
            book = self._supervisor.book(named.entry.id)
        lines = call.args.get("lines")
        self._answers.note(who, call, {"lines": book.stamped(lines if isinstance(lines, int) else 200)})
        if not call.args.get("follow"):
            self._answers.reply(who, call, {})
            return

        def more(new: list[str]) -> None:
            if not self._answers.note(who, call, {"lines": new}):
                stop_following()

        stop_following = book.follow(more)


def own_stacks() -> str:
    """Of this process: its threads and its tasks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]  # there is no public way to them
    ]
    for task in asyncio.all_tasks():
        frames = "".join(line for frame in task.get_stack() for line in traceback.format_stack(frame, limit=1))
        parts.append(f"task {task.get_coro()}\n{frames}")
    return "\n".join(parts)
