"""A model on a slow path says so, and why, wherever one looks; one that is as fast as it can be says nothing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stands.converted import in_dtype, quantized
from tests.stands.scraped import Scrape
from tests.stands.server import Server, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="half precision and quantized weights are fast on a GPU")
NAMES = ("whole", "half", "packed")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    import mlx.core as mx

    home = tmp_path_factory.mktemp("converted")
    models = {"whole": tiny, "half": in_dtype(tiny, home / "half", mx.float16), "packed": quantized(tiny, home / "packed")}
    with running(models) as server:
        for name in NAMES:
            server.ctl("load", name)
        yield server


def capabilities(server: Server, name: str) -> dict[str, object]:
    return json.loads(server.ctl("models", "show", name, "--json").stdout)["capabilities"]


def test_status_doctor_and_log_name_the_slow_ones_and_the_reason(server: Server) -> None:
    slow = {name: server.model(name)["slow"] for name in NAMES}
    assert slow["whole"] is None
    assert "float16" in str(slow["half"]) and "4-bit" in str(slow["packed"])
    looks = server.ctl("status"), server.ctl("doctor", check=False), server.ctl("logs", "omlxd")
    for look in looks:
        said = look.stdout + look.stderr
        assert f"half is slow: {slow['half']}" in said and f"packed is slow: {slow['packed']}" in said
        assert "whole is slow" not in said
    scrape = Scrape(server.get("/metrics").body.decode())
    assert [scrape["omlxd_model_slow", name] for name in NAMES] == [0, 1, 1]


def test_the_numbers_behind_it_are_shown(server: Server) -> None:
    for name in NAMES:
        numbers = capabilities(server, name)["self_check"]
        assert 0 < numbers["bandwidth_bytes_per_s"] < 1e12 and numbers["took_s"] > 0  # pyright: ignore
    whole = capabilities(server, "whole")["self_check"]
    assert whole["decode_s"] > 0 and whole["prefill_tokens"] == 32  # pyright: ignore


def test_it_can_be_left_out(server: Server) -> None:
    (server.home / "settings.json").write_text('{"scheduler": {"self_check": false}}')
    server.ctl("reload")
    server.ctl("unload", "half")
    server.ctl("load", "half")
    assert server.model("half")["slow"] is None
    assert "self_check" not in capabilities(server, "half")
