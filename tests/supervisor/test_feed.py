"""The event feed: who asks in time misses nothing, who asks too late gets told to start over."""

from supervisor.feed import RING_EVENTS, Feed
from supervisor.protocol import Event, Message


class Audience:
    def __init__(self) -> None:
        self.heard: dict[bytes, list[int]] = {}
        self.gone: set[bytes] = set()

    def send(self, who: bytes, message: Message) -> bool:
        assert isinstance(message, Event)
        if who not in self.gone:
            self.heard.setdefault(who, []).append(message.seq)
        return who not in self.gone


def test_a_watcher_hears_what_happens_from_now_on_in_order() -> None:
    audience = Audience()
    feed = Feed(audience.send)
    feed.publish("slot")
    feed.watch(b"c.1", [])
    feed.publish("slot", model="m")
    feed.publish("child")
    assert audience.heard == {b"c.1": [2, 3]}


def test_a_watcher_hears_only_the_topics_it_named() -> None:
    audience = Audience()
    feed = Feed(audience.send)
    feed.watch(b"c.1", ["child"])
    for kind in ("slot", "child", "log", "child"):
        feed.publish(kind)
    assert audience.heard == {b"c.1": [2, 4]}


def test_a_watcher_that_is_gone_is_tried_once_and_never_again() -> None:
    audience = Audience()
    feed = Feed(audience.send)
    feed.watch(b"c.1", [])
    audience.gone.add(b"c.1")
    feed.publish("slot")
    audience.gone.clear()
    feed.publish("slot")
    assert audience.heard == {}


def test_a_forgotten_watcher_hears_nothing() -> None:
    audience = Audience()
    feed = Feed(audience.send)
    feed.watch(b"g.1", [])
    feed.forget(b"g.1")
    feed.forget(b"g.2")
    feed.publish("slot")
    assert audience.heard == {}


def test_what_was_missed_can_be_asked_for() -> None:
    feed = Feed(Audience().send)
    for _ in range(5):
        feed.publish("slot")
    assert [event.seq for event in feed.since(2) or []] == [3, 4, 5]
    assert feed.since(5) == []
    assert [event.seq for event in feed.since(0) or []] == [1, 2, 3, 4, 5]


def test_who_missed_more_than_the_ring_holds_has_to_start_over() -> None:
    feed = Feed(Audience().send)
    for _ in range(RING_EVENTS + 10):
        feed.publish("slot")
    assert feed.since(9) is None
    assert len(feed.since(10) or []) == RING_EVENTS


def test_who_remembers_a_former_server_has_to_start_over() -> None:
    feed = Feed(Audience().send)
    assert feed.since(4000) is None
    feed.publish("slot")
    assert feed.since(4000) is None
