"""What a gateway tells the supervisor of the requests it has in its hands, with a lease or without."""

from __future__ import annotations

import asyncio
import json
import socket

from gateway.in_hand import STALLED_S, is_stalled
from gateway.records import Records
from gateway.trace import Step
from supervisor.protocol import Acquire, GatewayBeat, Message, Release
from tests.gateway.stand import CHAT, Stand
from tests.stands.scripted_supervisor import slot
from tests.stands.scripted_worker import says

LARGE = "x" * (4 << 20)
"""More than a system's socket buffers take by themselves."""


def said(stand: Stand, kind: type[Message]) -> int:
    """When that was said first."""
    return next(at for at, message in enumerate(stand.supervisor.received) if isinstance(message, kind))


def beats(stand: Stand) -> list[tuple[int, list[str]]]:
    return [(beat.inflight, beat.models) for beat in stand.supervisor.all(GatewayBeat)]


async def has_said(stand: Stand, beat: tuple[int, list[str]], after: int = 0) -> int:
    """The number of beats up to that one."""
    async with asyncio.timeout(30):
        while beat not in beats(stand)[after:]:
            await asyncio.sleep(0.01)
    return beats(stand).index(beat, after) + 1


async def knock(stand: Stand, body: bytes, send: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent so many bytes of its request's body, and takes little at a time."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # small segments make for small buffers at the server, too
    sock.connect(("127.0.0.1", stand.supervisor.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:send])
    return reader, writer


async def test_a_request_is_told_from_its_first_byte_and_its_model_before_the_lease_is_asked_for(stand: Stand) -> None:
    await stand.start(models=[slot("other"), slot()])
    body = json.dumps(CHAT).encode()
    reader, writer = await knock(stand, body, 5)
    known = await has_said(stand, (1, []))
    assert not stand.supervisor.all(Acquire)
    writer.write(body[5:])
    assert b"Hello" in await reader.read()
    known = await has_said(stand, (1, ["tiny"]), known)
    await has_said(stand, (0, []), known)
    received = stand.supervisor.received
    first = received.index(stand.supervisor.all(GatewayBeat)[known - 1])
    assert first < said(stand, Acquire) < said(stand, Release)
    writer.close()


async def test_an_answer_that_is_still_read_is_in_hand_when_its_lease_is_over(stand: Stand) -> None:
    await stand.start(says(LARGE))
    body = json.dumps(CHAT).encode()
    reader, writer = await knock(stand, body, len(body))
    await stand.supervisor.wait_for(Release)
    count = len(beats(stand))
    await stand.supervisor.wait_for(GatewayBeat, count + 2)
    assert beats(stand)[count:] == [(1, ["tiny"])] * len(beats(stand)[count:])
    taken = 0
    while data := await reader.read(1 << 20):
        taken += len(data)
    assert taken > len(LARGE)
    await has_said(stand, (0, []), count)
    writer.close()


async def test_who_leaves_is_in_nobodys_hands(stand: Stand) -> None:
    await stand.start(says(LARGE))
    body = json.dumps(CHAT).encode()
    _, writer = await knock(stand, body, 5)
    known = await has_said(stand, (1, []))
    writer.close()
    known = await has_said(stand, (0, []), known)
    _, writer = await knock(stand, body, len(body))
    await stand.supervisor.wait_for(Release)
    writer.transport.abort()
    await has_said(stand, (0, []), known)


def test_who_does_nothing_for_long_although_it_is_his_turn_is_not_waited_for() -> None:
    record = Records().begin("POST", "/v1/chat/completions", "")
    began = record.received_at
    assert not is_stalled(record, began + STALLED_S)
    assert is_stalled(record, began + STALLED_S + 1), "his body does not come"
    record.moved_at = began + STALLED_S
    assert not is_stalled(record, began + STALLED_S + 1)
    trace = record.answer("r")
    assert not is_stalled(record, began + 10 * STALLED_S), "it is ours"
    trace.enter(Step.QUEUED, began + 100)
    trace.end("stop", began + 1000)
    assert not is_stalled(record, began + 1000 + STALLED_S)
    assert is_stalled(record, began + 1001 + STALLED_S), "he does not read"
