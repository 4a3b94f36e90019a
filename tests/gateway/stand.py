"""The real gateway process between a scripted supervisor and a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from supervisor.protocol import SlotStatus
from tests.stands.scripted_supervisor import WORKER, ScriptedSupervisor, slot
from tests.stands.scripted_worker import Script, ScriptedWorker, says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Stand:
    """Everything a test needs; `start` brings it up."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.supervisor: ScriptedSupervisor
        self.worker: ScriptedWorker
        self.http: aiohttp.ClientSession

    async def start(
        self,
        script: Script | None = None,
        *,
        models: Sequence[SlotStatus] | None = None,
        settings: dict[str, object] | None = None,
        join: bool = True,
    ) -> Stand:
        self.supervisor = ScriptedSupervisor(models if models is not None else [slot()], settings or {})
        self._stack.push_async_callback(self.supervisor.stop)
        await self.supervisor.start_gateway()
        self.worker = await self.add_worker(WORKER, script or says("Hel", "lo"), join=join)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(self.url))
        async with self.http.get("/health") as response:
            assert response.status == 200
        return self

    async def add_worker(self, identity: str, script: Script, *, model: str = "tiny", join: bool = True) -> ScriptedWorker:
        worker = ScriptedWorker(self.supervisor.data, identity, script, model)
        self._stack.push_async_callback(worker.die)
        if join:
            await worker.join_until_welcome()
        return worker

    async def until(self, condition: Callable[[], Awaitable[bool]], within_s: float = 60) -> None:
        async with asyncio.timeout(within_s):
            while not await condition():
                await asyncio.sleep(0.02)

    async def until_status(self, status: int) -> None:
        """Until a request is answered so: what the supervisor has sent takes effect when the gateway has read it."""

        async def answered_so() -> bool:
            return (await self.chat())[0] == status

        await self.until(answered_so)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.supervisor.port}"

    async def chat(self, **fields: object) -> tuple[int, dict[str, object]]:
        async with self.http.post("/v1/chat/completions", json={**CHAT, **fields}) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def streaming(self, until: bytes, **fields: object) -> AsyncIterator[aiohttp.ClientResponse]:
        """A chat stream whose client has read that much: what happens from then on happens to an answer that has begun."""
        async with self.http.post("/v1/chat/completions", json={**CHAT, **fields, "stream": True}) as response:
            assert response.status == 200, await response.text()
            await response.content.readuntil(until)
            await response.content.readuntil(b"\n\n")
            yield response

    async def chat_stream(self, **fields: object) -> list[str]:
        """The payloads of all events, `[DONE]` included."""
        async with self.http.post("/v1/chat/completions", json={**CHAT, **fields, "stream": True}) as response:
            assert response.status == 200, await response.text()
            return payloads(await response.text())


def payloads(body: str) -> list[str]:
    events = body.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]
