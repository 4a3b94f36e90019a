"""The verb `cache_explain`: every worker is asked, one that does not answer is not waited for."""

import asyncio

import pytest

from supervisor import explaining
from supervisor.explaining import Explaining
from supervisor.protocol import Call, Explain, Explained, Message, Reply

ASKER = b"c.1"


class Shell:
    """Two workers, of which `reachable` take messages."""

    def __init__(self, *reachable: bytes) -> None:
        self.reachable = reachable
        self.fleet = self
        self.asked: list[bytes] = []
        self.replies: list[Reply] = []

    def ready(self) -> list[bytes]:
        return [b"w.0", b"w.1"]

    def send(self, identity: bytes, message: Message) -> bool:
        if isinstance(message, Explain):
            self.asked.append(identity)
            return identity in self.reachable
        assert identity == ASKER and isinstance(message, Reply)
        self.replies.append(message)
        return True


def ask(shell: Shell) -> Explaining:
    made = Explaining(shell)  # pyright: ignore[reportArgumentType]  # as much of a fleet as it looks at
    made.ask(ASKER, Call(id="1", verb="cache_explain", args={"rid": "req_7"}))
    return made


async def test_the_answer_comes_when_all_have_spoken_and_joins_what_they_know() -> None:
    shell = Shell(b"w.0", b"w.1")
    made = ask(shell)
    made.take(b"w.0", Explained(rid="req_7"))
    made.take(b"w.0", Explained(rid="req_8", lines=["another one"]))
    assert not shell.replies
    made.take(b"w.1", Explained(rid="req_7", lines=["a", "b"]))
    assert [(reply.ok, reply.result) for reply in shell.replies] == [(True, {"lines": ["a", "b"]})]
    made.take(b"w.1", Explained(rid="req_7", lines=["late"]))
    assert len(shell.replies) == 1


async def test_a_silent_worker_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "PATIENCE_S", 0.05)
    shell = Shell(b"w.0", b"w.1")
    ask(shell).take(b"w.1", Explained(rid="req_7", lines=["a"]))
    await asyncio.sleep(0.2)
    assert [reply.result for reply in shell.replies] == [{"lines": ["a"]}]


async def test_what_nobody_knows_is_refused_by_its_id() -> None:
    shell = Shell()
    ask(shell)
    assert [reply.ok for reply in shell.replies] == [False]
    assert "req_7" in (shell.replies[0].message or "")
