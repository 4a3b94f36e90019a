"""When something was, by the calendar: the machine's moments are monotonic, a clock that stands still while the machine sleeps.

Keeps what the difference of the two clocks was at which time, so that what happened before a sleep is not shown as later by the
length of it. Reads no clock.
"""

from collections import deque

STEP_S = 1.0
"""Less than that is the wall clock being put right bit by bit, or two readings that were not taken at one moment."""
KEPT = 200


class Dates:
    def __init__(self, monotonic: float, wall: float) -> None:
        """One moment on both clocks."""
        self._known: deque[tuple[float, float]] = deque([(monotonic, wall - monotonic)], maxlen=KEPT)
        """From which moment on the wall clock was how far ahead."""

    def note(self, monotonic: float, wall: float) -> None:
        """Call before a new moment is made use of."""
        if abs(wall - monotonic - self._known[-1][1]) > STEP_S:
            self._known.append((monotonic, wall - monotonic))

    def date(self, moment: float) -> float:
        ahead_s = next((ahead_s for since, ahead_s in reversed(self._known) if since <= moment), self._known[0][1])
        return moment + ahead_s
