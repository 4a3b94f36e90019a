"""When a step lasts so long that somebody will ask what it was at: the moment to write down the stacks. Pure.

It may still come to an end, unlike one that the supervisor kills a process for; then the log is all that is left to see.
"""

QUIET_S = 600.0
"""A model that is simply too slow for the limit need not fill its log."""


class StallWatch:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._dumped_at: float | None = None

    def is_due(self, busy_s: float, now: float) -> bool:
        """Call now and then, with how long the present step has been running: true once for a step, and not too often."""
        began_at = now - busy_s
        last = self._dumped_at
        if busy_s < self._limit_s or (last is not None and (began_at <= last or now - last < QUIET_S)):
            return False
        self._dumped_at = now
        return True
