"""What the gateway's log says about clients that leave or speak no HTTP: little, and nothing of what they sent."""

from __future__ import annotations

import asyncio
import struct
from socket import SO_LINGER, SOL_SOCKET

import pytest

from supervisor.protocol import Cancel, Submit
from tests.gateway.stand import CHAT, Stand
from tests.gateway.test_gateway_sockets import connect, raw_request
from tests.stands.scripted_worker import ScriptedWorker


@pytest.mark.parametrize(
    "malformed",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization : Bearer s3cret\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\nHost: localhost\nContent-Length: 20\n\n s3cret",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\ns3cret\r\n",
    ],
    ids=["header", "line", "chunk"],
)
async def test_a_malformed_request_is_one_line_without_what_was_sent(
    stand: Stand, capfd: pytest.CaptureFixture[str], malformed: bytes
) -> None:
    await stand.start()
    capfd.readouterr()
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.supervisor.port)
    writer.write(malformed)
    assert b" 400 " in (await asyncio.wait_for(reader.read(), 60)).splitlines()[0]
    writer.close()
    assert (await stand.chat())[0] == 200
    logged = "".join(line for line in capfd.readouterr().err.splitlines(keepends=True) if "gateway.request" not in line)
    assert "s3cret" not in logged
    assert logged.count("\n") == 1 and "127.0.0.1" in logged and "400" in logged


async def test_clients_that_leave_between_two_writes_leave_no_stack_behind(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    async def flood(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        for _ in range(5000):  # a gateway that is held up must not find more than it takes of one peer
            if any(cancel.rid == submit.rid for cancel in worker.all(Cancel)):
                break
            worker.row(submit, "x" * 2000)
            await asyncio.sleep(0)
        await worker.cancelled(submit)
        worker.row(submit, finish="cancelled")

    await stand.start(flood)
    for number in range(12):
        with connect(stand) as client:
            client.sendall(raw_request({**CHAT, "stream": True}))
            await stand.worker.wait_for(Submit, number + 1)
            await asyncio.sleep(0.02)
            client.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
    assert set(await stand.supervisor.outcomes(12)) == {"cancelled"}
    assert "Traceback" not in capfd.readouterr().err
