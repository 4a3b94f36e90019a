"""Who may come in: keys, hosts, origins, paths and methods; and that settings change without a restart."""

from __future__ import annotations

import asyncio

import pytest

from gateway.origin import OriginRules
from tests.gateway.stand import CHAT, Stand


def rules(*, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> OriginRules:
    return OriginRules(frozenset({"192.168.1.5"}), hosts, origins)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        (None, True),
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:8000", True),
        ("app.localhost", True),
        ("192.168.1.5:8000", True),
        ("192.168.1.6:8000", False),
        ("mac.lan:8000", True),
        ("MAC.lan", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("localhost:8000@evil.example", False),
        ("evil.example/localhost", False),
        ("localhost:port", False),
        ("", False),
    ],
)
def test_only_own_hosts_are_answered(host: str | None, allowed: bool) -> None:
    assert rules(hosts=("Mac.lan",)).host_allowed(host) is allowed
    assert rules(hosts=("*",)).host_allowed(host)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("http://mac.lan:8000", True),  # the page this very server serves
        ("https://chat.example", True),
        ("https://chat.example.evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://mac.lan:9000", False),
        ("null", False),
        ("chrome-extension://abc", False),
        ("", False),
    ],
)
def test_only_loopback_listed_and_own_origins_may_call(origin: str, allowed: bool) -> None:
    assert rules(origins=("https://chat.example",)).origin_allowed(origin, "mac.lan:8000") is allowed
    assert rules(origins=("*",)).origin_allowed(origin, None)


async def test_a_key_is_taken_from_wherever_a_client_puts_it(stand: Stand) -> None:
    await stand.start(settings={"api_key": "k1"})
    good: list[dict[str, str]] = [
        {"Authorization": "Bearer k1"},
        {"Authorization": "bearer  k1"},
        {"x-api-key": "k1"},
        {"x-goog-api-key": "k1"},
        {"Authorization": "Bearer DUMMY", "x-api-key": "k1"},
    ]
    for headers in good:
        async with stand.http.get("/v1/models", headers=headers) as response:
            assert response.status == 200, headers
    async with stand.http.get("/v1/models?key=k1") as response:
        assert response.status == 200
    bad: list[dict[str, str]] = [{}, {"Authorization": "Bearer k2"}, {"Authorization": "Basic k1"}, {"x-api-key": ""}]
    for headers in bad:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/api/status"),
            ("GET", "/nothing"),
        ):
            async with stand.http.request(method, path, headers=headers, json=CHAT if method == "POST" else None) as response:
                assert response.status == 401, (headers, path)
                error = (await response.json())["error"]
                assert error["type"] == "authentication_error" and "k2" not in error["message"]


async def test_health_and_preflights_need_no_key_and_no_key_means_any_key(stand: Stand) -> None:
    await stand.start(settings={"api_key": "k1"})
    async with stand.http.get("/health") as response:
        assert response.status == 200
    async with stand.http.options("/v1/chat/completions") as response:
        assert response.status == 204
    stand.supervisor.assign({"api_key": None})

    async def any_key_opens() -> bool:
        async with stand.http.get("/v1/models", headers={"Authorization": "Bearer DUMMY_KEY"}) as response:
            return response.status == 200

    await stand.until(any_key_opens)


async def test_settings_apply_to_the_next_request_and_wrong_ones_are_not_taken(stand: Stand) -> None:
    await stand.start()
    stand.supervisor.assign({"api_key": "k9"})
    await stand.until_status(401)
    stand.supervisor.assign({"api_key": 9, "keepalive_s": "soon"})
    await asyncio.sleep(0.2)
    assert (await stand.chat())[0] == 401
    stand.supervisor.assign({})
    await stand.until_status(200)


async def test_a_rebound_host_name_is_403(stand: Stand) -> None:
    await stand.start(settings={"allowed_hosts": ["mac.lan"]})
    for host, status in (("evil.example", 403), ("mac.lan:8000", 200), ("localhost", 200), ("127.0.0.1:1", 200)):
        async with stand.http.get("/v1/models", headers={"Host": host}) as response:
            assert response.status == status, host
            if status == 403:
                assert (await response.json())["error"]["code"] == "host_not_allowed"


async def test_a_foreign_page_may_not_post_and_reads_nothing(stand: Stand) -> None:
    await stand.start(settings={"cors_origins": ["https://chat.example"]})
    evil = {"Origin": "https://evil.example"}
    async with stand.http.post("/v1/chat/completions", json=CHAT, headers=evil) as response:
        assert response.status == 403 and (await response.json())["error"]["code"] == "origin_not_allowed"
    async with stand.http.get("/v1/models", headers=evil) as response:
        assert "Access-Control-Allow-Origin" not in response.headers
    async with stand.http.options("/v1/models", headers={**evil, "Access-Control-Request-Method": "POST"}) as response:
        assert response.status == 204 and "Access-Control-Allow-Origin" not in response.headers


async def test_an_allowed_page_gets_cors_headers_also_on_streams_and_errors(stand: Stand) -> None:
    await stand.start(settings={"cors_origins": ["https://chat.example"]})
    for origin in ("https://chat.example", "http://localhost:3000"):
        headers = {"Origin": origin}
        asked = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-a"}
        async with stand.http.options("/v1/chat/completions", headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-a"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for body, status in (({**CHAT, "stream": True}, 200), ({}, 400)):
            async with stand.http.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == origin
                assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
                await response.read()


async def test_every_response_carries_a_request_id_under_both_names(stand: Stand) -> None:
    await stand.start()
    seen: set[str] = set()
    for method, path, body in (("GET", "/health", None), ("GET", "/no", None), ("POST", "/v1/chat/completions", CHAT)):
        async with stand.http.request(method, path, json=body) as response:
            assert response.headers["x-request-id"] == response.headers["request-id"]
            assert response.headers["x-request-id"].startswith("req_")
            seen.add(response.headers["x-request-id"])
    assert len(seen) == 3


async def test_routes_exist_with_and_without_v1(stand: Stand) -> None:
    await stand.start()
    for prefix in ("", "/v1"):
        async with stand.http.get(f"{prefix}/models") as response:
            assert response.status == 200
        async with stand.http.get(f"{prefix}/models/tiny") as response:
            assert response.status == 200
        async with stand.http.post(f"{prefix}/chat/completions", json=CHAT) as response:
            assert response.status == 200
        async with stand.http.post(f"{prefix}/completions", json={"model": "tiny", "prompt": "x"}) as response:
            assert response.status == 200


async def test_other_paths_are_404_and_wrong_methods_405_both_in_json(stand: Stand) -> None:
    await stand.start()
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/status/more", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ):
        async with stand.http.request(method, path) as response:
            assert response.status == status, path
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
            if status == 405:
                assert response.headers["Allow"]


async def test_head_works_where_get_does(stand: Stand) -> None:
    await stand.start()
    for path in ("/health", "/v1/models", "/v1/models/tiny", "/api/status"):
        async with stand.http.head(path) as response:
            assert response.status == 200 and await response.read() == b""
