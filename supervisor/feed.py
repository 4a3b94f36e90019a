"""The event feed: numbers what happens, remembers the last thousand events, sends them to whoever watches."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from supervisor.protocol import Event, Message, SlotStatus

RING_EVENTS = 1000


class Feed:
    """Watchers are known by their socket identity; one that cannot be reached any more is dropped."""

    def __init__(self, send: Callable[[bytes, Message], bool]) -> None:
        """`send` returns False when that peer is gone."""
        self._send = send
        self._ring: deque[Event] = deque(maxlen=RING_EVENTS)
        self._watchers: dict[bytes, frozenset[str]] = {}
        self.seq = 0

    def publish(
        self,
        kind: str,
        *,
        model: str | None = None,
        gen: int = 0,
        data: dict[str, object] | None = None,
        status: SlotStatus | None = None,
    ) -> None:
        self.seq += 1
        event = Event(seq=self.seq, ts=time.time(), kind=kind, model=model, gen=gen, data=data or {}, status=status)
        self._ring.append(event)
        for who, topics in list(self._watchers.items()):
            if (not topics or kind in topics) and not self._send(who, event):
                del self._watchers[who]

    def watch(self, who: bytes, topics: Sequence[str]) -> None:
        self._watchers[who] = frozenset(topics)

    def since(self, seq: int) -> list[Event] | None:
        """The events after `seq`, or None when some of them are forgotten already, or were another server's."""
        if seq > self.seq or (self._ring and self._ring[0].seq > seq + 1):
            return None
        return [event for event in self._ring if event.seq > seq]

    def forget(self, who: bytes) -> None:
        self._watchers.pop(who, None)
