"""Tells the supervisor whether anything decodes here: when that changes, and only while a neighbour is at work.

The beginning is said at once, as every neighbour's chunk must get smaller; the end a little later, as another request often
follows. On the event loop.
"""

import asyncio
from collections.abc import Callable

from supervisor.protocol import Activity

END_HELD_BACK_S = 0.1


class ActivityReport:
    def __init__(self, say: Callable[[Activity], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._decoding = False
        self._said: bool | None = None
        """None: nobody is interested."""
        self._timer: asyncio.TimerHandle | None = None

    def neighbours(self, busy: int) -> None:
        """So many are at work."""
        if busy and self._said is None:
            self._report()
        elif not busy:
            self._said = None

    def decodes(self, decoding: bool) -> None:
        self._decoding = decoding
        if self._timer is not None:
            self._timer.cancel()
        if decoding:
            self._report_change()
        else:
            self._timer = self._loop.call_later(END_HELD_BACK_S, self._report_change)

    def _report_change(self) -> None:
        if self._said is not None and self._said is not self._decoding:
            self._report()

    def _report(self) -> None:
        self._said = self._decoding
        self._say(Activity(decoding=self._decoding))
