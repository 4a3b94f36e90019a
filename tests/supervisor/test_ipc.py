"""The transport on real sockets: nobody waits for anybody, nothing is lost silently, nobody else can listen."""

import asyncio
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from supervisor import ipc
from supervisor.ipc import BindFailed, Frames, PathTooLong, PeerLost, PeerStuck, bind_router, connect_dealer, endpoint


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omx") as directory:
        yield Path(directory)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


async def until(condition, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_messages_go_both_ways_with_the_peers_name_in_front(run: Path, context) -> None:
    at_router: list[Frames] = []
    at_dealer: list[Frames] = []
    router = bind_router(context, run / "s.sock", at_router.append)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "g.1", at_dealer.append)
    dealer.send([b"hello", b"body"])
    await until(lambda: at_router)
    assert at_router == [[b"g.1", b"hello", b"body"]]
    router.send([b"g.1", b"assign", b"x"])
    await until(lambda: at_dealer)
    assert at_dealer == [[b"assign", b"x"]]
    router.close()
    dealer.close()


async def test_a_peer_that_never_was_is_lost_and_one_that_left_is_too(run: Path, context) -> None:
    arrived: list[Frames] = []
    router = bind_router(context, run / "s.sock", arrived.append)
    with pytest.raises(PeerLost):
        router.send([b"w.0.1.0", b"stop", b""])
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "w.0.1.0", lambda frames: None)
    dealer.send([b"hello", b""])
    await until(lambda: arrived)
    router.send([b"w.0.1.0", b"assign", b""])
    dealer.close()

    def is_lost() -> bool:
        try:
            router.send([b"w.0.1.0", b"stop", b""])
        except PeerLost:
            return True
        return False

    await until(is_lost)
    router.close()
    with pytest.raises(PeerLost):
        router.send([b"w.0.1.0", b"stop", b""])


async def test_a_peer_that_does_not_read_is_stuck_and_holds_up_nobody_else(run: Path, context, monkeypatch) -> None:
    monkeypatch.setattr(ipc, "ROUTER_HWM_MESSAGES", 10)
    arrived: list[Frames] = []
    router = bind_router(context, run / "s.sock", arrived.append)
    stuck = context.socket(zmq.DEALER)
    stuck.setsockopt(zmq.IDENTITY, b"stuck")
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.connect(endpoint(run / "s.sock"))
    stuck.send_multipart([b"hello", b""])
    heard: list[Frames] = []
    well = connect_dealer(context, endpoint(run / "s.sock"), "well", heard.append)
    well.send([b"hello", b""])
    await until(lambda: len(arrived) == 2)
    with pytest.raises(PeerStuck):
        for _ in range(10_000):
            router.send([b"stuck", b"rows", b"x" * 20_000])
    for number in range(1, 51):
        router.send([b"well", b"rows", str(number).encode()])
        await until(lambda number=number: len(heard) == number)
    assert [frames[1] for frames in heard] == [str(number).encode() for number in range(1, 51)]
    router.close()
    well.close()
    stuck.close(0)


async def test_no_message_is_overlooked_when_both_ends_send_and_receive_at_once(run: Path, context) -> None:
    """The descriptor is edge-triggered and a send may swallow the edge: without a second look this stops half-way."""
    storm = 3000
    at_router: list[bytes] = []
    at_dealer: list[bytes] = []

    def answer(frames: Frames) -> None:
        at_router.append(frames[2])
        router.send([frames[0], b"echo", frames[2]])

    def echoed(frames: Frames) -> None:
        at_dealer.append(frames[1])
        if len(at_dealer) % 3 == 0:
            dealer.send([b"extra", b"extra"])

    router = bind_router(context, run / "s.sock", answer)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "c.1", echoed)
    for number in range(storm):
        dealer.send([b"n", str(number).encode()])
        if number % 7 == 0:
            await asyncio.sleep(0)
    await until(lambda: sum(body != b"extra" for body in at_dealer) == storm, 30)
    await until(lambda: len(at_router) == len(at_dealer))
    assert [body for body in at_dealer if body != b"extra"] == [str(number).encode() for number in range(storm)]
    router.close()
    dealer.close()


async def test_no_message_is_overlooked_or_out_of_order_when_another_thread_sends_as_well(run: Path, context) -> None:
    """Its sends swallow edges too, of messages that only the loop receives."""
    storm = 3000
    at_router: list[bytes] = []
    at_dealer: list[bytes] = []

    def answer(frames: Frames) -> None:
        at_router.append(frames[2])
        router.send([frames[0], b"echo", frames[2]])

    router = bind_router(context, run / "s.sock", answer)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "c.1", lambda frames: at_dealer.append(frames[1]))

    def from_elsewhere() -> None:
        for number in range(storm):
            dealer.send([b"n", b"thread %d" % number])

    elsewhere = threading.Thread(target=from_elsewhere)
    elsewhere.start()
    for number in range(storm):
        dealer.send([b"n", b"loop %d" % number])
        if number % 7 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(at_dealer) == 2 * storm, 60)
    elsewhere.join()
    assert at_dealer == at_router
    for sender in (b"thread", b"loop"):
        assert [body for body in at_dealer if body.startswith(sender)] == [b"%b %d" % (sender, n) for n in range(storm)]
    router.close()
    dealer.close()
    with pytest.raises(PeerLost):
        dealer.send([b"n", b"late"])


async def test_a_message_that_another_threads_send_takes_notice_of_is_received(run: Path, context) -> None:
    at_router: list[Frames] = []
    at_dealer: list[Frames] = []
    router = bind_router(context, run / "s.sock", at_router.append)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "c.1", at_dealer.append)
    dealer.send([b"hello", b""])
    await until(lambda: at_router)

    def from_elsewhere() -> None:
        router.send([b"c.1", b"assign", b"x"])
        time.sleep(0.2)  # it arrives
        dealer.send([b"n", b"x"])

    elsewhere = threading.Thread(target=from_elsewhere)
    elsewhere.start()
    elsewhere.join()  # the loop is held up meanwhile: when it looks again, no descriptor announces anything
    await until(lambda: at_dealer)
    assert at_dealer == [[b"assign", b"x"]]
    router.close()
    dealer.close()


async def test_an_error_in_a_handler_does_not_strand_the_messages_behind_it(run: Path, context) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    taken: list[bytes] = []

    def take(frames: Frames) -> None:
        if frames[2] == b"bad":
            raise ValueError("a bug")
        taken.append(frames[2])

    router = bind_router(context, run / "s.sock", take)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "c.1", lambda frames: None)
    for body in (b"bad", b"1", b"bad", b"2", b"3"):
        dealer.send([b"n", body])
    await until(lambda: len(taken) == 3)
    assert taken == [b"1", b"2", b"3"]
    router.close()
    dealer.close()


async def test_the_socket_is_for_this_user_only_and_the_umask_is_put_back(run: Path, context) -> None:
    before = os.umask(0o022)
    try:
        router = bind_router(context, run / "s.sock", lambda frames: None)
        assert stat.S_IMODE((run / "s.sock").stat().st_mode) == 0o600
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    router.close()


async def test_a_socket_file_left_by_a_killed_server_is_replaced(run: Path, context) -> None:
    (run / "s.sock").touch()
    arrived: list[Frames] = []
    router = bind_router(context, run / "s.sock", arrived.append)
    dealer = connect_dealer(context, endpoint(run / "s.sock"), "c.1", lambda frames: None)
    dealer.send([b"n", b""])
    await until(lambda: arrived)
    router.close()
    dealer.close()


async def test_a_place_that_cannot_be_bound_is_named(run: Path, context) -> None:
    (run / "s.sock").mkdir()
    with pytest.raises(BindFailed, match=r"s\.sock"):
        bind_router(context, run / "s.sock", lambda frames: None)


def test_a_path_too_long_for_a_socket_is_named_with_the_way_out() -> None:
    path = Path("/tmp") / ("x" * ipc.MAX_PATH_BYTES) / "control.sock"
    with pytest.raises(PathTooLong) as caught:
        endpoint(path)
    assert str(path) in str(caught.value) and "OMLX_RUN_DIR" in str(caught.value)
    assert endpoint(Path("/tmp/c.sock")) == "ipc:///tmp/c.sock"
