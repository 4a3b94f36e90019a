"""A client that resets its connection in the middle of a long prefill, again and again: who asks next is served at once, and
each repeat of the prompt starts further along."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.stands.models import tiny_model
from tests.stands.server import Server, running

PROMPT = [20 + i % 300 for i in range(8000)]
REPEATS = 5
CHUNK_TOKENS = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    slow = tiny_model(tmp_path_factory.mktemp("reset") / "slow", num_hidden_layers=16, max_position_embeddings=8192)
    with running({"slow": slow}) as server:
        server.ctl("load", "slow")
        yield server


def test_after_a_reset_the_next_is_served_at_once_and_the_repeat_starts_further_along(server: Server) -> None:
    kept = [0]
    for number in range(REPEATS):
        long = ask_and_stay_silent(server)
        server.wait_for(lambda: cached(server) > kept[-1], 60, "the prefill gets on")
        reset(long)
        at_reset = cached(server)
        begun = time.monotonic()
        short = server.post("/v1/completions", {"model": "slow", "prompt": [11 + number, 12], "max_tokens": 1})
        took_s = time.monotonic() - begun
        assert short.status == 200
        kept.append(cached(server))
        assert kept[-1] - at_reset <= 2 * CHUNK_TOKENS, f"computed for nobody, while the next waited for {took_s:.2f} s"
    assert kept == sorted(set(kept)), "each repeat goes on where the one before was stopped"
    assert kept[-1] < len(PROMPT) - CHUNK_TOKENS, "the prompt was over before its last client left"
    beginning = {"model": "slow", "prompt": PROMPT[: kept[-1] + 1], "max_tokens": 1}
    assert server.post("/v1/completions", beginning).cached_tokens == kept[-1]
    server.wait_for(lambda: server.model("slow")["leases"] == 0, 5, "nothing is held for anybody")


def ask_and_stay_silent(server: Server) -> socket.socket:
    body = json.dumps({"model": "slow", "prompt": PROMPT, "max_tokens": 1}).encode()
    link = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(body)}\r\n\r\n"
    link.sendall(head.encode() + body)
    return link


def reset(link: socket.socket) -> None:
    """RST instead of FIN."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def cached(server: Server) -> int:
    """Tokens of the prompt that its repeat would not compute."""
    probed = server.post("/api/cache/probe", {"model": "slow", "prompt": PROMPT}).json()
    return probed["hot"] + probed["cold"]
