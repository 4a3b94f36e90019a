"""The engine's pulse: written by the engine thread, read by whoever reports it.

Two things prove different facts: `progress` grows only when work got done, `busy_s` grows while a step is stuck.
Single-attribute writes need no lock; a beat may be one step old.
"""

import dataclasses

from worker.job import EngineBeat


class Meter:
    def __init__(self) -> None:
        self._progress = 0
        self._busy_since: float | None = None
        self._last = EngineBeat()

    def advance(self, amount: int) -> None:
        """Tokens prefilled, decoded or restored; while loading, one per report."""
        self._progress += amount

    def begin(self, now: float) -> None:
        self._busy_since = now

    def end(self) -> None:
        self._busy_since = None

    def publish(self, beat: EngineBeat) -> None:
        self._last = beat

    def beat(self, now: float) -> EngineBeat:
        since = self._busy_since
        busy_s = 0.0 if since is None else max(0.0, now - since)
        return dataclasses.replace(self._last, progress=self._progress, busy_s=busy_s)
