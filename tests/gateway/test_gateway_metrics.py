"""GET /metrics: the status of the moment and what requests came to, in a form that Prometheus reads."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from gateway.metrics import LEVELS, STATES
from supervisor.pressure import Level
from supervisor.protocol import Abandon, Acquire, Beat, ChildStatus, Code, Rejected, Release, plain
from supervisor.slot_events import SlotState
from tests.gateway.stand import CHAT, Stand
from tests.gateway.test_gateway_cache import PROBE, counts
from tests.stands.patience import patient_s
from tests.stands.scraped import Scrape
from tests.stands.scripted_supervisor import slot

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEAT = Beat(
    seq=1,
    progress=1,
    running=2,
    waiting=3,
    parked=1,
    parks=5,
    kv_bytes=100,
    hot_bytes=200,
    store_written_bytes=300,
    cache={
        "asked_tokens": 50,
        "hot_tokens": 30,
        "cold_tokens": 10,
        "cold_hits": 4,
        "miss_bad": 6,
        "drop_credit": 7,
        "bad_EIO": 8,
    },
    draft={"proposed": 9, "accepted": 5},
)


async def scrape(stand: Stand) -> Scrape:
    async with stand.http.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Scrape(await response.text())


def test_the_states_and_levels_are_all_there_are() -> None:
    assert tuple(SlotState) == STATES
    assert tuple(level.name.lower() for level in Level) == LEVELS


async def test_the_page_lists_exactly_what_is_exported(stand: Stand) -> None:
    await stand.start()
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((await scrape(stand)).families)


async def test_server_models_and_workers_show_their_numbers(stand: Stand) -> None:
    loaded = slot(
        "org/tiny", slow="no OpenBLAS", charged_bytes=11, measured_bytes=12, waiting=1, restarts=2, gen=9, beat=plain(BEAT)
    )
    await stand.start(models=[loaded, slot("other", state="failed", usable=False)])
    stand.supervisor.more = {
        "charged_bytes": 21, "reserve_bytes": 22, "measured_bytes": 23, "pressure": "hard", "warnings": ["a", "b"],
        "children": [ChildStatus(name="text", state="running", restarts=3), ChildStatus(name="janitor", state="backoff")],
    }  # fmt: skip
    found = await scrape(stand)
    for name, value in (("charged", 21), ("reserve", 22), ("measured", 23), ("budget", 1)):
        assert found[f"omlxd_memory_{name}_bytes"] == value
    assert found["omlxd_build_info", "1.2.3"] == 1 and found["omlxd_supervisor_up"] == 1
    assert [found["omlxd_memory_pressure", level] for level in LEVELS] == [0, 0, 1, 0]
    assert found["omlxd_warnings"] == 2
    assert (found["omlxd_child_up", "text"], found["omlxd_child_up", "janitor"]) == (1, 0)
    assert found["omlxd_child_restarts_total", "text"] == 3

    assert [state for state in STATES if found["omlxd_model_state", "org/tiny", state]] == ["ready"]
    assert [state for state in STATES if found["omlxd_model_state", "other", state]] == ["failed"]
    assert (found["omlxd_model_slow", "org/tiny"], found["omlxd_model_slow", "other"]) == (1, 0)
    assert (found["omlxd_model_usable", "org/tiny"], found["omlxd_model_usable", "other"]) == (1, 0)
    for name, value in (
        ("charged_bytes", 11),
        ("measured_bytes", 12),
        ("queued", 1),
        ("restarts_total", 2),
        ("loads_total", 9),
    ):
        assert found[f"omlxd_model_{name}", "org/tiny"] == value
    worker = {"running": 2, "waiting": 3, "parked": 1, "parks_total": 5, "kv_bytes": 100, "hot_bytes": 200}
    for name, value in worker.items():
        assert found[f"omlxd_worker_{name}", "org/tiny"] == value
    assert not found.has("omlxd_worker_running", "other"), "it has no worker"
    cache = {"asked_tokens": 50, "written_bytes": 300}
    for name, value in cache.items():
        assert found[f"omlxd_cache_{name}_total", "org/tiny"] == value
    split = {"hit_tokens ram": 30, "hit_tokens ssd": 10, "hit_blocks ssd": 4, "missed_blocks bad": 6, "bad_blocks EIO": 8}
    for name, value in {**split, "dropped_blocks credit": 7}.items():
        family, label = name.split()
        assert found[f"omlxd_cache_{family}_total", "org/tiny", label] == value
    assert [found["omlxd_draft_tokens_total", "org/tiny", kind] for kind in ("proposed", "accepted")] == [9, 5]


async def test_requests_are_counted_by_route_status_and_outcome_and_never_by_what_a_client_chose(stand: Stand) -> None:
    await stand.start(models=[slot("tiny", aliases=["nick"])])
    assert (await stand.chat(model="nick", user="secret"))[0] == 200
    await stand.chat_stream()
    await stand.chat(model="unheard-of")
    await stand.chat(temperature=9)
    for path in ("/v1/models/tiny", "/v1/models/odd", "/odd/path"):
        async with stand.http.get(path, headers={"x-request-id": "odd-id"}):
            pass
    stand.supervisor.on_acquire = lambda acquire: Rejected(rid=acquire.rid, code=Code.QUEUE_FULL, message="Full.")
    await stand.chat()
    async with stand.http.get("/metrics") as response:
        text = await response.text()
    found, chat = Scrape(text), "/v1/chat/completions"
    count = "omlxd_requests_total"
    assert found[count, chat, "200", "stop"] == 2
    assert found[count, chat, "429", "queue_full"] == 1
    assert found[count, chat, "404", "model_not_found"] == 1
    assert found[count, chat, "400", "invalid_value"] == 1
    assert (found[count, "/v1/models/{id}", "200", "ok"], found[count, "(other)", "404", "not_found"]) == (1, 1)
    for chosen in ("nick", "secret", "unheard", "odd", "req_"):
        assert chosen not in text
    assert found["omlxd_prompt_tokens_total", "tiny"] == 14
    assert [found["omlxd_cached_tokens_total", "tiny", tier] for tier in ("ram", "ssd")] == [2, 4]
    assert found["omlxd_completion_tokens_total", "tiny"] > 0
    assert found["omlxd_request_first_token_seconds_count", "tiny"] == 2
    assert found["omlxd_request_seconds_count", "tiny"] == found["omlxd_request_queue_seconds_count", "tiny"] == 3
    assert 0 < found["omlxd_request_first_token_seconds_sum", "tiny"] < found["omlxd_request_seconds_sum", "tiny"]


async def test_a_client_that_left_counts_as_499(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.on_acquire = lambda _: None
    asking = asyncio.ensure_future(stand.http.post("/v1/chat/completions", json=CHAT))
    await stand.supervisor.wait_for(Acquire)
    asking.cancel()
    await stand.supervisor.wait_for(Abandon)
    found = await scrape(stand)
    assert found["omlxd_requests_inflight"] == 0
    assert found["omlxd_requests_total", "/v1/chat/completions", "499", "cancelled"] == 1


async def test_a_probe_of_the_cache_is_a_request_and_no_answer(stand: Stand) -> None:
    await stand.start(counts)
    async with stand.http.post(PROBE, json=CHAT) as response:
        assert response.status == 200
    await stand.supervisor.wait_for(Release)
    found = await scrape(stand)
    assert found["omlxd_requests_total", PROBE, "200", "ok"] == 1
    assert not found.has("omlxd_request_seconds_count", "tiny")


async def test_a_supervisor_that_hangs_is_seen(stand: Stand) -> None:
    await stand.start()
    await stand.chat()
    stand.supervisor.answers_calls = False
    began_at = time.monotonic()
    found = await scrape(stand)
    assert time.monotonic() - began_at < patient_s(8)
    assert found["omlxd_supervisor_up"] == 0 and not found.has("omlxd_memory_budget_bytes")
    assert found["omlxd_prompt_tokens_total", "tiny"] == 7
    async with asyncio.timeout(patient_s(8)), stand.http.get("/api/status") as response:
        assert response.status == 500 and "supervisor did not answer" in (await response.json())["error"]["message"]


async def test_metrics_are_behind_the_key(stand: Stand) -> None:
    await stand.start(settings={"api_key": "k1"})
    for headers, status in (({}, 401), ({"Authorization": "Bearer k1"}, 200)):
        async with stand.http.get("/metrics", headers=headers) as response:
            assert response.status == status
