"""How long a worker's end waits for its line to a gateway."""

import pytest
import zmq

from supervisor.ipc import Frames
from supervisor.protocol import Join, Message, Submit, Welcome, encode
from worker import link_gateway
from worker.link_gateway import GatewayLink

LINGER_MS = 500


class Line:
    """Stands in for the socket."""

    def __init__(self) -> None:
        self.lingers_ms: int | None = None

    def send(self, frames: Frames) -> None:
        pass

    def close(self, linger_ms: int) -> None:
        self.lingers_ms = linger_ms


class Nobody:
    """Serves nothing."""

    def submit(self, gateway: GatewayLink, message: Submit) -> None:
        raise AssertionError(message)

    def cancel(self, rid: str) -> None:
        raise AssertionError(rid)

    def drop(self, gateway: GatewayLink) -> None:
        pass


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.line = Line()
        self.on_frames: object = None

        def connect(context: object, endpoint: str, identity: str, on_frames: object) -> Line:
            self.on_frames = on_frames
            return self.line

        monkeypatch.setattr(link_gateway, "connect_dealer", connect)
        join = Join(v=1, build="b", worker="t.1", model="", nonce="n")
        self.link = GatewayLink(zmq.Context.instance(), "ipc:///nowhere", join, Nobody(), lambda: None)

    def hear(self, message: Message) -> None:
        assert callable(self.on_frames)
        self.on_frames(encode(message))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_what_was_said_last_gets_its_time_to_reach_a_gateway_that_is_there(world: World) -> None:
    world.hear(Welcome(epoch="e"))
    world.link.close(LINGER_MS)
    assert world.line.lingers_ms == LINGER_MS


async def test_asking_a_gateway_that_is_gone_to_be_let_in_holds_up_no_end(world: World) -> None:
    """The gateway leaves first when a server stops, so that every text worker is in this position."""
    world.hear(Welcome(epoch="e"))
    world.link.lost()
    world.link.close(LINGER_MS)
    assert world.line.lingers_ms == 0


async def test_a_gateway_that_never_answered_holds_up_no_end(world: World) -> None:
    world.link.close(LINGER_MS)
    assert world.line.lingers_ms == 0
