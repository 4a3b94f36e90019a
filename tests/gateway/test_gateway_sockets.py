"""Clients at the level of sockets: half-closed, pipelined, deaf."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from contextlib import ExitStack

from supervisor.protocol import Cancel, Submit
from tests.gateway.stand import CHAT, Stand
from tests.stands.patience import patient_s
from tests.stands.scripted_worker import ScriptedWorker, hangs, says


def raw_request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def connect(stand: Stand, *, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", stand.supervisor.port))
    return client


async def send_until_nobody_reads(client: socket.socket) -> None:
    refused = 0
    while refused < 10:
        try:
            client.send(b"x" * 100_000)
            refused = 0
        except BlockingIOError:
            refused += 1
            await asyncio.sleep(0.05)


async def test_a_half_closed_connection_counts_as_a_client_that_left(stand: Stand) -> None:
    await stand.start(hangs)
    with connect(stand) as client:
        client.sendall(raw_request({**CHAT, "stream": True}))
        await stand.worker.wait_for(Submit)
        client.shutdown(socket.SHUT_WR)
        await stand.worker.wait_for(Cancel, timeout_s=patient_s(2))
    assert await stand.supervisor.outcomes() == ["cancelled"]


async def test_a_client_that_leaves_behind_an_unread_pipelined_body_is_noticed(stand: Stand) -> None:
    """Reading is paused then, so the event loop never sees the end of the connection."""
    await stand.start(hangs)
    with connect(stand) as client:
        client.sendall(raw_request({**CHAT, "stream": True}))
        await stand.worker.wait_for(Submit)
        client.setblocking(False)
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000000\r\n\r\n")
        await send_until_nobody_reads(client)
        assert not stand.worker.all(Cancel)
    await stand.worker.wait_for(Cancel)
    assert await stand.supervisor.outcomes() == ["cancelled"]


async def test_pipelined_requests_are_answered_in_order(stand: Stand) -> None:
    await stand.start(says("one"))
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.supervisor.port)
    writer.write(raw_request(CHAT) + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answers = (await asyncio.wait_for(reader.read(), 60)).decode()
    assert answers.count("HTTP/1.1 200 OK") == 2
    assert answers.index("chat.completion") < answers.index('"status"')
    writer.close()


async def test_a_client_that_does_not_read_ends_only_its_own_request(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        is_flood = submit.prompt.messages == [{"role": "user", "content": "flood"}]
        for _ in range(400 if is_flood else 40):
            worker.row(submit, "x" * (100_000 if is_flood else 10))
            await asyncio.sleep(0.02)
            if any(cancel.rid == submit.rid for cancel in worker.all(Cancel)):
                worker.row(submit, finish="cancelled")
                return
        worker.row(submit, finish="stop")

    await stand.start(script)
    with connect(stand, receive_bytes=4096) as deaf:
        flood = {**CHAT, "messages": [{"role": "user", "content": "flood"}], "stream": True}
        deaf.sendall(raw_request(flood))
        (flooded,) = await stand.worker.wait_for(Submit)
        polite = asyncio.create_task(stand.chat_stream())
        (cancel,) = await stand.worker.wait_for(Cancel)
        assert cancel.rid == flooded.rid
        assert (await polite)[-1] == "[DONE]"
        assert sorted(await stand.supervisor.outcomes(2)) == ["cancelled", "ok"]
        deaf.settimeout(60)
        received = b""
        try:
            while block := await asyncio.to_thread(deaf.recv, 1 << 20):
                received = received[-100:] + block
        except ConnectionResetError:
            pass
        assert not received.endswith(b"0\r\n\r\n")  # never a clean end


async def test_a_client_that_reads_late_but_reads_gets_everything(stand: Stand) -> None:
    await stand.start(says(*(f"{number} " for number in range(2000))))
    async with stand.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        await asyncio.sleep(1.5)
        text = await response.text()
    assert '"1999 "' in text and text.endswith("data: [DONE]\n\n")


async def test_a_connection_is_kept_for_the_next_request(stand: Stand) -> None:
    await stand.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.supervisor.port)
    began = time.monotonic()
    for _ in range(2):
        writer.write(raw_request({**CHAT, "stream": True}))
        body = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
        assert b"[DONE]" in body
    assert time.monotonic() - began < patient_s(2)
    writer.close()


async def test_more_clients_are_served_than_a_terminal_of_macos_allows_open_files(stand: Stand) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        await stand.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))  # the clients' ends are open here
    with ExitStack() as open_ones:
        open_ones.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        clients = [open_ones.enter_context(connect(stand)) for _ in range(300)]
        for client in clients:
            client.settimeout(patient_s(20))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [client.recv(12) for client in clients]
    assert set(answers) == {b"HTTP/1.1 200"}
