"""The OpenAI SDK, unmodified, against the gateway."""

from __future__ import annotations

import asyncio

import openai
import pytest

from supervisor.protocol import Submit
from tests.gateway.stand import Stand
from tests.stands.scripted_supervisor import slot
from tests.stands.scripted_worker import ScriptedWorker, refuses

MESSAGES = [{"role": "user", "content": "hi"}]


def client(stand: Stand, **more: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="x", **more)  # pyright: ignore[reportArgumentType]


async def test_the_async_client_chats_streams_and_completes(stand: Stand) -> None:
    await stand.start()
    async with client(stand) as ai:
        answer = await ai.chat.completions.create(model="tiny", messages=MESSAGES)  # pyright: ignore[reportArgumentType]
        assert answer.choices[0].message.content == "Hello" and answer.usage is not None and answer.usage.total_tokens == 9
        options = {"include_usage": True}
        stream = await ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options)  # pyright: ignore
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 7
        done = await ai.completions.create(model="tiny", prompt="x")
        assert done.choices[0].text == "Hello"
        async with ai.chat.completions.stream(model="tiny", messages=MESSAGES) as helper:  # pyright: ignore[reportArgumentType]
            assert (await helper.get_final_completion()).choices[0].message.content == "Hello"


async def test_the_sync_client_works_from_a_thread(stand: Stand) -> None:
    await stand.start()

    def ask() -> str:
        with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="x") as ai:
            stream = ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # pyright: ignore
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            whole = ai.chat.completions.create(model="tiny", messages=MESSAGES)  # pyright: ignore[reportArgumentType]
            assert whole.choices[0].message.content == streamed
            return streamed

    assert await asyncio.to_thread(ask) == "Hello"


async def test_the_raw_response_shows_the_request_id_and_the_ignored_fields(stand: Stand) -> None:
    await stand.start()
    async with client(stand) as ai:
        create = ai.chat.completions.with_raw_response.create
        raw = await create(model="tiny", messages=MESSAGES, extra_body={"mirostat": 1})  # pyright: ignore[reportArgumentType]
        assert raw.headers["x-omlxd-ignored"] == "mirostat"
        assert raw.parse()._request_id == raw.headers["x-request-id"]


async def test_models_are_listed_and_found(stand: Stand) -> None:
    await stand.start(models=[slot("org/name")])
    async with client(stand) as ai:
        assert [model.id async for model in ai.models.list()] == ["org/name"]
        assert (await ai.models.retrieve("org/name")).owned_by == "omlxd"
        with pytest.raises(openai.NotFoundError):
            await ai.models.retrieve("none")


async def test_errors_are_the_sdks_own_classes_and_permanent_ones_are_not_repeated(stand: Stand) -> None:
    await stand.start(refuses("context_length_exceeded", "Too long."))
    async with client(stand, max_retries=2) as ai:
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.chat.completions.create(model="tiny", messages=MESSAGES)  # pyright: ignore[reportArgumentType]
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(model="none", messages=MESSAGES)  # pyright: ignore[reportArgumentType]
    assert len(stand.supervisor.all_acquired) == 1


async def test_an_error_in_mid_stream_is_raised(stand: Stand) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit)
        worker.row(submit, "Half")
        await has_read.wait()
        worker.problem(submit, "internal", "The engine failed.")

    has_read = asyncio.Event()
    await stand.start(script)
    async with client(stand) as ai:
        stream = await ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # pyright: ignore
        seen = ""
        with pytest.raises(openai.APIError, match="The engine failed"):
            async for chunk in stream:
                seen += chunk.choices[0].delta.content or ""
                if seen:
                    has_read.set()
        assert seen == "Half"
