"""The engine's news on their way to the event loop: rows in mid-answer take a shorter one, and nothing is overtaken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from supervisor.ipc import PeerStuck
from supervisor.protocol import Message, Piece, Prompt, Row, Rows, Submit
from tests.stands.listener import Listener
from tests.stands.models import tiny_model
from worker import link_requests
from worker.engine import Engine
from worker.link_gateway import GatewayLink
from worker.link_requests import LoadedModel, ModelRequests, Prepared
from worker.link_sink import EngineSink, OnLoop
from worker.text import Text

LIMIT_S = 25


def row(seq: int = 0, rid: str = "r", **more: object) -> Row:
    return Row(rid=rid, seq=seq, tokens=seq + 1, pieces=[Piece(text="x")], **more)  # type: ignore[arg-type]


class News:
    """What was heard, in order, and on which thread."""

    def __init__(self, takes: Callable[[list[Row]], bool]) -> None:
        self.heard: list[tuple[str, object, int]] = []
        self._takes = takes

    def send_rows(self, rows: list[Row]) -> bool:
        if not self._takes(rows):
            return False
        self._note("sent", rows[0].seq)
        return True

    def on_rows(self, rows: list[Row]) -> None:
        self._note("rows", rows[0].seq)

    def on_accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None:
        self._note("accepted", rid)

    def on_error(self, rid: str, code: str, message: str) -> None:
        self._note("error", rid)
        raise ValueError("a bug")

    def _note(self, what: str, of: object) -> None:
        self.heard.append((what, of, threading.get_ident()))

    def names(self) -> list[tuple[str, object]]:
        return [(what, of) for what, of, _ in self.heard]


async def on_the_engines_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as engine:
        await asyncio.wait_for(asyncio.wrap_future(engine.submit(work)), LIMIT_S)


async def test_rows_in_mid_answer_are_sent_on_the_engines_thread_with_the_loop_at_something_else() -> None:
    news = News(lambda rows: True)
    sink = EngineSink(asyncio.get_running_loop(), cast("OnLoop", news))
    engine = threading.Thread(target=lambda: [sink.rows([row(seq)]) for seq in range(3)])
    engine.start()
    engine.join(LIMIT_S)  # the loop does nothing meanwhile
    assert news.names() == [("sent", 0), ("sent", 1), ("sent", 2)]
    assert threading.get_ident() not in {thread for _, _, thread in news.heard}


async def test_no_row_overtakes_what_was_said_before_it() -> None:
    news = News(lambda rows: rows[0].finish is None)
    sink = EngineSink(asyncio.get_running_loop(), cast("OnLoop", news))

    def work() -> None:
        sink.accepted("r", 0, 0, 0)
        sink.rows([row(0)])
        sink.rows([row(1, finish="stop")])
        sink.rows([row(2)])

    engine = threading.Thread(target=work)
    engine.start()
    engine.join(LIMIT_S)
    assert news.heard == [], "the loop is not there yet"
    await asyncio.sleep(0.01)
    await on_the_engines_thread(lambda: sink.rows([row(3)]))
    assert news.names() == [("accepted", "r"), ("rows", 0), ("rows", 1), ("rows", 2), ("sent", 3)]


async def test_news_that_the_loop_fails_at_do_not_keep_rows_from_their_short_way() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    news = News(lambda rows: True)
    sink = EngineSink(asyncio.get_running_loop(), cast("OnLoop", news))
    await on_the_engines_thread(lambda: sink.error("r", "internal", "no"))
    await asyncio.sleep(0.01)
    await on_the_engines_thread(lambda: sink.rows([row(0)]))
    assert news.names() == [("error", "r"), ("sent", 0)]


class Stuck(Listener):
    def send(self, message: Message) -> None:
        raise PeerStuck(b"rows")


class Asked:
    """Requests that are at work, each for a gateway."""

    def __init__(self, requests: ModelRequests) -> None:
        self.requests = requests

    def of(self, gateway: Listener, *rids: str) -> None:
        for rid in rids:
            submit = Submit(epoch=gateway.epoch, rid=rid, task="chat", prompt=Prompt(text="x"))
            self.requests.submit(cast("GatewayLink", gateway), submit)


@pytest.fixture
async def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    waits = threading.Event()

    def prepare(model: LoadedModel, vocabulary: object, submit: Submit) -> Prepared:
        waits.wait(LIMIT_S)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr(link_requests, "prepare", prepare)
    with ThreadPoolExecutor(1) as pool:
        requests = ModelRequests(pool)
        requests.open(LoadedModel(Text.open(tiny_model(tmp_path / "tiny")), cast("Engine", None), 2048))
        yield Asked(requests)
        requests.fall_silent()
        waits.set()


async def test_only_rows_that_need_no_thought_take_the_short_way(asked: Asked) -> None:
    one, other, requests = Listener(), Listener(), asked.requests
    asked.of(one, "r", "s")
    asked.of(other, "t")
    for rows in (
        [row(finish="stop")],
        [row(), row(rid="s", finish="length")],
        [row(logprobs=[{}])],
        [row(rid="unknown")],
        [row(), row(rid="t")],
    ):
        assert not requests.send_rows(rows)
    assert (one.heard, other.heard) == ([], [])
    assert requests.send_rows([row(), row(rid="s")]) and requests.send_rows([row(rid="t")])
    assert one.heard == [Rows(epoch="e", rows=[row(), row(rid="s")])]
    assert other.heard == [Rows(epoch="e", rows=[row(rid="t")])]


async def test_rows_are_for_the_life_of_a_gateway_that_asked_for_them(asked: Asked) -> None:
    """Whatever the loop hears meanwhile: a welcome by the next one changes the line's epoch under the engine's hands."""
    gateway = Listener()
    asked.of(gateway, "r")
    gateway.epoch = "the next life"
    asked.of(gateway, "s")
    assert not asked.requests.send_rows([row(), row(rid="s")])
    assert asked.requests.send_rows([row()]) and asked.requests.send_rows([row(rid="s")])
    assert gateway.heard == [Rows(epoch="e", rows=[row()]), Rows(epoch="the next life", rows=[row(rid="s")])]


async def test_a_line_that_takes_nothing_is_no_failure_of_the_engine(asked: Asked) -> None:
    gateway = Stuck()
    asked.of(gateway, "r")
    assert not asked.requests.send_rows([row()]), "the loop is to find out"
