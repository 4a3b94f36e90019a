"""The models list, the state of the server, and how both follow the supervisor's events."""

from __future__ import annotations

import asyncio
import time

from yarl import URL

from supervisor.protocol import Acquire, Event, EventKind
from tests.gateway.stand import CHAT, Stand
from tests.stands.patience import patient_s
from tests.stands.scripted_supervisor import slot
from tests.stands.scripted_worker import hangs, says

ORG = "mlx-community/Qwen3-4B-4bit"
MODELS = [
    slot("tiny", aliases=["default"]),
    slot(ORG, state="idle", context=32768, max_tokens=512),
    slot("broken", usable=False),
]


async def test_the_list_satisfies_both_dialects_and_leaves_out_what_cannot_be_served(stand: Stand) -> None:
    await stand.start(models=MODELS)
    async with stand.http.get("/v1/models") as response:
        body = await response.json()
    assert body["object"] == "list" and body["has_more"] is False
    assert (body["first_id"], body["last_id"]) == ("tiny", ORG)
    assert [entry["id"] for entry in body["data"]] == ["tiny", ORG]
    assert body["data"][1] == {
        "id": ORG,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "omlxd",
        "type": "model",
        "display_name": ORG,
        "aliases": [],
        "root": ORG,
        "parent": None,
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "context_length": 32768,
        "max_model_len": 32768,
        "max_input_tokens": 32768,
        "max_tokens": 512,
    }


async def test_an_id_with_a_slash_is_found_plain_and_escaped(stand: Stand) -> None:
    await stand.start(models=MODELS)
    for written in (ORG, ORG.replace("/", "%2F"), "default"):
        async with stand.http.get(URL(f"{stand.url}/v1/models/{written}", encoded=True)) as response:
            assert response.status == 200, written
            assert (await response.json())["id"] == ("tiny" if written == "default" else ORG)
    for written in ("none", "broken"):
        async with stand.http.get(f"/v1/models/{written}") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_an_alias_is_a_model_too(stand: Stand) -> None:
    await stand.start(models=MODELS)
    status, body = await stand.chat(model="default")
    assert status == 200 and body["model"] == "default"


async def test_an_adapter_is_found_by_its_id_and_by_its_bases_alias(stand: Stand) -> None:
    adapter = slot("tiny+style", base="tiny", profiles=["cold"])
    await stand.start(models=[slot("tiny", aliases=["quick"]), adapter])
    for name, found in (("tiny+style", "tiny+style"), ("quick+style", "tiny+style"), ("quick+style:cold", "tiny+style:cold")):
        async with stand.http.get(f"/v1/models/{name}") as response:
            body = await response.json()
        assert (body["id"], body["parent"]) == (found, "tiny")
    async with stand.http.get("/v1/models/quick+other") as response:
        assert response.status == 404


PROFILED = [slot("tiny", aliases=["quick"], profiles=["cold", "warm"]), slot(ORG, state="idle")]


async def test_profiles_are_listed_and_found_like_models(stand: Stand) -> None:
    await stand.start(models=PROFILED)
    async with stand.http.get("/v1/models") as response:
        assert [entry["id"] for entry in (await response.json())["data"]] == ["tiny", "tiny:cold", "tiny:warm", ORG]
    for name in ("tiny:warm", "quick:warm"):
        async with stand.http.get(f"/v1/models/{name}") as response:
            body = await response.json()
            assert (body["id"], body["root"]) == ("tiny:warm", "tiny")
        status, body = await stand.chat(model=name)
        assert status == 200 and body["model"] == name
    assert (await stand.chat(model="tiny:none"))[0] == 404
    assert [message.model for message in stand.supervisor.all(Acquire)] == ["tiny:warm", "quick:warm"]


async def test_a_request_without_a_model_gets_the_default_one_by_its_real_id(stand: Stand) -> None:
    await stand.start(models=PROFILED, settings={"default_model": "quick:warm"})
    status, body = await stand.chat(model=None)
    assert status == 200 and body["model"] == "tiny"
    assert [message.model for message in stand.supervisor.all(Acquire)] == ["quick:warm"]
    assert (await stand.chat(model="nope"))[0] == 404


async def test_an_unknown_model_falls_back_only_where_the_settings_say_so(stand: Stand) -> None:
    await stand.start(models=PROFILED, settings={"default_model": "tiny", "model_fallback": True})
    status, body = await stand.chat(model="gpt-4")
    assert status == 200 and body["model"] == "tiny"
    status, body = await stand.chat(model=ORG)
    assert status == 200 and body["model"] == ORG


async def test_without_a_default_a_request_has_to_name_its_model(stand: Stand) -> None:
    await stand.start()
    status, body = await stand.chat(model=None)
    assert (status, body["error"]["code"]) == (400, "missing_required_parameter")


async def test_events_add_change_and_remove_models(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.change("new", slot("new"))
    stand.supervisor.change("tiny", None)

    async def listed() -> list[str]:
        async with stand.http.get("/v1/models") as response:
            return [entry["id"] for entry in (await response.json())["data"]]

    async def changed() -> bool:
        return await listed() == ["new"]

    await stand.until(changed)
    assert (await stand.chat())[0] == 404


async def test_an_event_older_than_the_snapshot_changes_nothing(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.send(Event(seq=1, ts=0.0, kind=EventKind.SLOT, model="tiny"))
    await asyncio.sleep(0.2)
    assert (await stand.chat())[0] == 200


async def test_status_shows_the_server_and_what_the_gateway_is_doing(stand: Stand) -> None:
    await stand.start(hangs)
    stand.supervisor.models = [slot(charged_bytes=5, leases=1)]  # without an event: a lease is not worth one
    running = stand.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    async with running, stand.http.get("/api/status") as response:
        body = await response.json()
    assert body["version"] == "1.2.3" and (body["models"][0]["charged_bytes"], body["models"][0]["leases"]) == (5, 1)
    assert body["gateway"] == {"identity": "g.1", "requests": 1, "inflight": 1, "ignored_fields": {}}


async def test_health_is_quick_while_many_streams_run(stand: Stand) -> None:
    await stand.start(says(*("word " for _ in range(100)), gap_s=0.01))
    streams = [asyncio.create_task(stand.chat_stream()) for _ in range(30)]
    await asyncio.sleep(0.3)
    waits: list[float] = []
    for _ in range(10):
        began = time.monotonic()
        async with stand.http.get("/health") as response:
            assert (await response.json())["status"] == "ok"
        waits.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    assert sorted(waits)[5] < patient_s(0.5), waits
    assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*streams))
