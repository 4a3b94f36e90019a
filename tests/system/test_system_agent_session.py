"""A short coding session with a changing header, a killed worker and a restart: nearly all that can be reused is reused."""

from pathlib import Path

from benchmarks.agent_session import GATE, NAME, replay
from tests.stands.models import tiny_model
from tests.stands.server import running
from worker.text import Text


def test_nearly_all_that_an_agent_repeats_comes_from_the_cache(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=32768)
    with running({NAME: model}) as server:
        result = replay(server, Text.open(model), turns=8)
    assert [turn.before for turn in result.turns if turn.before] == ["worker killed", "server restarted"]
    assert result.turns[0].cached_tokens == 0
    assert result.hit_rate >= GATE
    assert 0 < result.hot_tokens + result.cold_tokens <= result.sum_of("cached_tokens")


def test_with_headers_left_in_place_nothing_would_be_reused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=32768)
    with running({NAME: model}, {"cache": {"volatile_headers": ["something else:"]}}) as server:
        answers = [server.post("/v1/chat/completions", body) for body in _bodies()]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]


def _bodies() -> list[dict[str, object]]:
    from benchmarks.agent_session import session

    return [{"model": NAME, "messages": messages, "max_tokens": 2, "temperature": 0} for messages in session(3)]
