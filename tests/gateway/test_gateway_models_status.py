"""What clients made for oMLX read before they register models."""

from __future__ import annotations

from tests.gateway.stand import Stand
from tests.stands.scripted_supervisor import slot


async def test_the_status_of_models_has_the_shape_of_omlx_and_says_what_the_cache_does(stand: Stand) -> None:
    off = "off: layer 0 uses OddCache"
    await stand.start(
        models=[slot("tiny", cache="RAM up to 1.0 GiB"), slot("odd", state="idle", cache=off), slot("broken", usable=False)]
    )
    for path in ("/v1/models/status", "/models/status"):
        async with stand.http.get(path) as response:
            assert response.status == 200
            listed = {entry["id"]: entry for entry in (await response.json())["models"]}
        assert set(listed) == {"tiny", "odd"}
        assert listed["tiny"]["loaded"] and not listed["odd"]["loaded"]
        assert (listed["odd"]["model_type"], listed["odd"]["engine_type"], listed["odd"]["cache"]) == ("llm", "batched", off)
        assert listed["tiny"]["max_context_window"] > 0
