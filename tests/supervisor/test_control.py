"""The control socket with a real fleet behind it: who is believed, who is answered, who is ignored."""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import zmq

from supervisor import slot_events as slots
from supervisor.build import build
from supervisor.census import Census
from supervisor.control import Control, ControlShell
from supervisor.fleet import Fleet, FleetShell
from supervisor.fleet import WorkerProcess as Process
from supervisor.ipc import Frames, connect_dealer, endpoint
from supervisor.logs import LogBook
from supervisor.paths import Paths, paths_of
from supervisor.process import Child
from supervisor.protocol import (
    VERSION,
    Assign,
    Beat,
    Call,
    Grant,
    Hello,
    LoadProgress,
    Message,
    Problem,
    Reply,
    Stop,
    Watch,
    decode,
    encode,
)
from supervisor.settings import Settings
from supervisor.settings_load import Loaded


class FakeChild:
    """The process of a worker, as far as the fleet looks at it."""

    pid = 4711

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class FakeAttendant:
    def __init__(self) -> None:
        self.identity, self.nonce, self.hello = b"g.1", "secret", False
        self.duty = SimpleNamespace(name="gateway")
        self.refusals: list[str] = []
        self.heard_times = 0

    def greeted(self) -> None:
        self.hello = True

    def heard(self) -> None:
        self.heard_times += 1

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)


class Counted(Control):
    """Counts what it has taken in and given out."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], paths: Paths, shell: ControlShell) -> None:
        self.taken = 0
        self.given: Counter[bytes] = Counter()
        super().__init__(context, paths, shell)

    def send(self, identity: bytes, message: Message) -> bool:
        is_sent = super().send(identity, message)
        self.given[identity] += is_sent
        return is_sent

    def _take(self, frames: Frames) -> None:
        try:
            super()._take(frames)
        finally:
            self.taken += 1


class Stand:
    """Control and Fleet on a real socket; what they hand on is remembered."""

    def __init__(self, directory: Path) -> None:
        self.paths = paths_of(directory, Settings())
        self.paths.run.mkdir(mode=0o700)
        self.control_endpoint = endpoint(self.paths.control)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events: list[slots.SlotEvent] = []
        self.asked: list[tuple[str, Message]] = []
        self.assigned: list[object] = []
        self.in_catalog = True
        self.sent = 0
        self.other_builds: list[tuple[str, str | None, int]] = []
        self.restarts_for_it = True
        self.loaded = Loaded(Settings(), directory, {})
        self.census = Census(self.paths.children)
        self.gateway = FakeAttendant()
        self.staff = SimpleNamespace(
            of=lambda identity: self.gateway if identity == b"g.1" else None, assign=self.assigned.append
        )
        self.fleet = Fleet(cast("FleetShell", self))
        self.child = FakeChild()
        self.control = Counted(self.context, self.paths, cast("ControlShell", self))

    def with_worker(self) -> None:
        worker = Process("m", 1, self.fleet.identity("m", 1).encode(), "nonce", cast("Child", self.child))
        self.fleet._by_model["m"] = self.fleet._by_identity[worker.identity] = worker

    def happened(self, event: slots.SlotEvent) -> None:
        self.events.append(event)

    def send(self, identity: bytes, message: Message) -> bool:
        return self.control.send(identity, message)

    def book(self, name: str) -> LogBook:
        return LogBook(name, self.paths.run)

    def assignment(self, model: str, gen: int) -> Assign | None:
        return Assign(kind="text", gen=gen, data_endpoints=[]) if self.in_catalog else None

    def from_gateway(self, gateway: str, message: Message) -> None:
        self.asked.append((gateway, message))

    def other_build(self, other: str, model: str | None = None, gen: int = 0) -> bool:
        self.other_builds.append((other, model, gen))
        return self.restarts_for_it

    def from_client(self, identity: bytes, message: Message) -> None:
        self.asked.append((identity.decode(), message))


class Peer:
    def __init__(self, stand: Stand, identity: str) -> None:
        self.got: list[Message] = []
        self._stand = stand
        self._identity = identity.encode()
        self._wire = connect_dealer(stand.context, stand.control_endpoint, identity, lambda f: self.got.append(decode(f)[0]))

    async def say(self, *messages: Message) -> None:
        """Returns when the other end has taken them in, and its answers are here."""
        for message in messages:
            self.send(encode(message))
        control = self._stand.control
        async with asyncio.timeout(20):
            while control.taken < self._stand.sent or len(self.got) < control.given[self._identity]:
                await asyncio.sleep(0.01)

    def send(self, frames: Frames) -> None:
        self._wire.send(frames)
        self._stand.sent += 1


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    with tempfile.TemporaryDirectory(prefix="omx") as directory:
        stand = Stand(Path(directory))
        yield stand
        stand.control.close()
        stand.context.destroy(linger=0)


def hello(nonce: str, build_: str | None = None, v: int = VERSION) -> Hello:
    return Hello(v=v, build=build_ or build(), nonce=nonce, pid=4711)


BEAT = Beat(seq=1, progress=1)


async def test_a_worker_that_proves_whose_child_it_is_gets_its_assignment(stand: Stand) -> None:
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce"), LoadProgress(stage="weights", done=1, total=2))
    assert [message.KIND for message in worker.got] == ["assign"]
    assert stand.events == [slots.WorkerHello("m", 1), slots.WorkerProgress("m", 1, "weights", 1, 2)]


async def test_a_worker_is_told_with_a_grant_that_more_comes_soon(stand: Stand) -> None:
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce"))
    stand.fleet.grant(slots.GrantMemory("m", 1, kv_bytes=5, more_soon=True))
    stand.fleet.grant(slots.GrantMemory("m", 1, kv_bytes=9))
    await worker.say(BEAT)
    assert worker.got[1:] == [Grant(kv_bytes=5, more_soon=True), Grant(kv_bytes=9)]


async def test_a_wrong_nonce_is_ignored_and_so_is_all_that_follows(stand: Stand) -> None:
    stand.with_worker()
    impostor = Peer(stand, "w.0.1.0")
    await impostor.say(hello("guessed"), BEAT, LoadProgress(stage="weights"))
    assert impostor.got == [] and stand.events == []


async def test_a_worker_of_another_build_is_a_matter_for_a_restart(stand: Stand) -> None:
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce", build_="0.0.9"))
    assert stand.other_builds == [("0.0.9", "m", 1)]
    assert stand.events == [] and worker.got == []


async def test_a_worker_whose_build_a_restart_has_not_brought_is_a_fault_and_is_killed(stand: Stand) -> None:
    stand.restarts_for_it = False
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce", build_="0.0.9"), BEAT)
    [fault] = stand.events
    assert isinstance(fault, slots.WorkerFault)
    assert fault.code == "version_mismatch" and fault.fatal and "0.0.9" in fault.message
    assert stand.child.killed and worker.got == []


async def test_a_worker_whose_model_left_the_catalog_meanwhile_is_told_nothing(stand: Stand) -> None:
    stand.with_worker()
    stand.in_catalog = False
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce"), LoadProgress(stage="tokenizer"))
    assert worker.got == [] and len(stand.events) == 2


async def test_hello_twice_is_one_event_and_two_assignments(stand: Stand) -> None:
    """The assignment may have been lost with a connection."""
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce"), hello("nonce"))
    assert len(stand.events) == 1 and len(worker.got) == 2


async def test_a_message_that_is_not_for_the_supervisor_is_answered(stand: Stand) -> None:
    stand.with_worker()
    worker = Peer(stand, "w.0.1.0")
    await worker.say(hello("nonce"), Stop(reason="r", flush_deadline_s=1))
    assert isinstance(worker.got[-1], Problem) and worker.got[-1].code == "unknown_kind"


async def test_the_gateway_is_believed_from_its_hello_on_and_every_word_counts_as_a_sign_of_life(stand: Stand) -> None:
    gateway = Peer(stand, "g.1")
    await gateway.say(Watch())
    assert stand.asked == [] and stand.gateway.heard_times == 0
    await gateway.say(hello("wrong"))
    assert not stand.gateway.hello
    await gateway.say(hello("secret"), Watch())
    assert stand.assigned == [stand.gateway]
    assert stand.asked == [("g.1", Watch())]
    assert stand.gateway.heard_times >= 2


@pytest.mark.parametrize(("build_", "v"), [("0.0.9", VERSION), (None, VERSION + 1)])
async def test_a_gateway_of_another_build_or_version_is_refused(stand: Stand, build_: str | None, v: int) -> None:
    gateway = Peer(stand, "g.1")
    await gateway.say(hello("secret", build_, v))
    assert not stand.gateway.hello and stand.assigned == []
    assert "restart omlxd" in stand.gateway.refusals[0] and len(stand.other_builds) == 1


async def test_an_unknown_kind_and_garbage_are_answered_and_harm_nobody_behind_them(stand: Stand) -> None:
    client = Peer(stand, "c.1.x")
    for frames in ([b"teleport", b"\x80"], [b"call", b"\xc1"], [b""], [b"call", msgspec.msgpack.encode({"id": "1"})]):
        client.send(frames)
    await client.say(Call(id="1", verb="status"))
    assert [m.code for m in client.got if isinstance(m, Problem)] == ["unknown_kind", *["bad_request"] * 3]
    assert stand.asked == [("c.1.x", Call(id="1", verb="status"))]


async def test_a_call_of_another_version_is_refused_by_name(stand: Stand) -> None:
    client = Peer(stand, "c.1.x")
    await client.say(Call(id="1", verb="status", v=VERSION + 1))
    [reply] = client.got
    assert isinstance(reply, Reply) and reply.code == "version_mismatch" and not reply.ok
    assert stand.asked == []


async def test_strangers_are_not_answered(stand: Stand) -> None:
    for name in ("w.9.9.0", "g.77", "x"):
        stranger = Peer(stand, name)
        await stranger.say(hello("nonce"), Call(id="1", verb="stop"), BEAT)
        assert stranger.got == []
    assert stand.asked == [] and stand.events == []


async def test_a_worker_that_cannot_be_started_is_an_exit_with_the_reason(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    stand.fleet.spawn("m", 1)
    [exited] = stand.events
    assert isinstance(exited, slots.WorkerExited)
    assert (exited.model, exited.gen) == ("m", 1) and "no process could be started" in exited.tail
    assert stand.fleet.worker("m") is None


async def test_sending_to_nobody_says_so(stand: Stand) -> None:
    assert stand.send(b"c.gone", Reply(id="1", ok=True)) is False
