"""Which requests of clients are in this gateway's hands, as the supervisor has to know it.

It does not start again under them, and no model that one of them is for idles out, although a worker has nothing to do with a
body that is still read from a client, or an answer that is still read by one.
"""

import time
from collections.abc import Callable, Collection

from gateway.records import Record, Records

STALLED_S = 60.0
"""Who has neither given nor taken anything for so long, although it is his turn, is not waited for."""


class InHand:
    def __init__(self, records: Records, say: Callable[[int, Collection[str]], None]) -> None:
        """`say` is called with the number of requests and the models that they are for."""
        self._records = records
        self._say = say
        self._told: tuple[bool, Collection[str]] = (False, frozenset())
        records.on_change = self._look

    def say(self) -> None:
        """Whether it has changed or not: some of them may have stalled."""
        self._look(always=True)

    def _look(self, *, always: bool = False) -> None:
        now = time.monotonic()
        held = [record for record in self._records.open if not is_stalled(record, now)]
        models = frozenset(record.model for record in held if record.model)
        if always or (bool(held), models) != self._told:
            self._told = bool(held), models
            self._say(len(held), models)


def is_stalled(record: Record, now: float) -> bool:
    """Its turn it is while its body is on the way, and once nothing is computed for it any more."""
    over = [trace.over_at for trace in record.answers]
    ends = [at for at in over if at is not None]
    return len(ends) == len(over) and now - max(record.received_at, record.moved_at, *ends) > STALLED_S
