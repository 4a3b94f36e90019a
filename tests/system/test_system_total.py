"""The limit for the requests of all models together, from outside."""

import threading
from pathlib import Path

import pytest

from tests.stands.clients import Streamed, stream
from tests.stands.models import tiny_model
from tests.stands.server import Answer, running

ONE_AT_A_TIME = {"scheduler": {"max_concurrent_total": 1, "max_queue": 1}}
TOKENS = 150


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("slow") / "slow", num_hidden_layers=48)


def test_a_limit_of_one_holds_across_models_and_what_does_not_fit_the_queue_is_told_at_once(slow: Path, tiny: Path) -> None:
    with running({"a": slow, "b": tiny}, ONE_AT_A_TIME) as server:
        server.ctl("load", "a")
        server.ctl("load", "b")
        first, second, by_then = Streamed(), list[Answer](), list[int]()

        def ask_b() -> None:
            second.append(server.chat("b", "hello", max_tokens=2))
            by_then.append(first.tokens)  # two threads read: which sees its end first is nobody's promise

        streaming = threading.Thread(target=stream, args=(server, "a", TOKENS, first))
        streaming.start()
        server.wait_for(lambda: first.arrivals, 30, "the stream runs")
        asking = threading.Thread(target=ask_b)
        asking.start()
        server.wait_for(lambda: server.model("b")["waiting"] == 1, 10, "the other model's request waits")
        for model in ("a", "b"):
            refused = server.chat(model, "one too many", max_tokens=2)
            assert (refused.status, refused.error["code"]) == (429, "queue_full"), refused
            assert int(refused.headers["Retry-After"]) >= 1
        assert not first.done and not second, "the stream has to outlast the refusals"
        streaming.join()
        asking.join()
        assert (first.done, first.tokens, second[0].status) == (True, TOKENS, 200)
        assert by_then[0] > TOKENS / 2
        assert server.chat("b", "and now?", max_tokens=2).status == 200
