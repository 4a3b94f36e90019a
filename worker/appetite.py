"""How much KV this worker asks the supervisor for beyond its assignment, and when it gives that back.

A need that is above the grant is said once, and again when it grows or after a while; it is taken back when those that had it
are gone. What was lent and not needed for some time goes back. Lives on the engine thread; must not know sequences or lanes.
"""

from typing import Protocol

from worker.admission import Admission

ASK_AGAIN_S = 5.0
ANSWER_S = 0.5
"""An answer takes a millisecond; a supervisor that has not spoken by then has other troubles."""
SOON_S = 3.0
"""A hot cache has shrunk when the next heartbeat says so, within 1 s; a worker that exits takes a little longer."""
LOAN_S = 30.0
"""Agents pause between two turns: what they needed a moment ago they will likely need again."""
LOOK_EVERY_S = 0.25


class Say(Protocol):
    def __call__(self, kv_bytes: int) -> None: ...


class Appetite:
    def __init__(self, admission: Admission, say: Say, loan_s: float = LOAN_S) -> None:
        self._admission = admission
        self._say = say
        self._loan_s = loan_s
        self._assigned_bytes = admission.granted_bytes
        self._asked_bytes = 0
        self._asked_at = 0.0
        self._awaits_until = 0.0
        self._spare_since: float | None = None
        self._most_bytes = 0
        """Needed since then."""
        self._looked_at = 0.0

    @property
    def has_loan(self) -> bool:
        return self._admission.granted_bytes > self._assigned_bytes

    @property
    def has_asked(self) -> bool:
        """For more than it has got, so that others may be made to go for it."""
        return self._asked_bytes > self._admission.granted_bytes

    def ask(self, needed_bytes: int, now: float) -> None:
        if needed_bytes > self._asked_bytes or now - self._asked_at > ASK_AGAIN_S:
            self._asked_bytes, self._asked_at = needed_bytes, now
            self._awaits_until = max(self._awaits_until, now + ANSWER_S)
            self._say(needed_bytes)

    def granted(self, kv_bytes: int, now: float, *, more_soon: bool = False) -> None:
        if kv_bytes >= self._asked_bytes:
            self._asked_bytes = 0
        self._admission.granted_bytes = kv_bytes
        self._awaits_until = now + SOON_S if more_soon else 0.0

    def awaits_answer(self, now: float) -> bool:
        """More may be granted at any moment: nobody need be put aside yet."""
        return now < self._awaits_until

    def is_due(self, now: float) -> bool:
        """To be asked before `settle`: what is needed is not worth summing up at every step."""
        return (self.has_loan or self.has_asked) and now - self._looked_at >= LOOK_EVERY_S

    def settle(self, needed_bytes: int, now: float) -> bool:
        """Takes back what nobody needs that it asked for, gives back what was not needed for `loan_s`; whether it gave."""
        self._looked_at = now
        if self.has_asked and needed_bytes <= self._admission.granted_bytes:
            self._asked_bytes, self._awaits_until = 0, 0.0
            self._say(self._admission.granted_bytes)
        if needed_bytes >= self._admission.granted_bytes:
            self._spare_since = None
            return False
        if self._spare_since is None:
            self._spare_since, self._most_bytes = now, 0
        self._most_bytes = max(self._most_bytes, needed_bytes)
        if now - self._spare_since < self._loan_s:
            return False
        self._spare_since, self._asked_bytes = None, 0
        # Not used from now on, whenever the answer comes: the charge is lowered when this is heard.
        self._admission.granted_bytes = max(self._assigned_bytes, self._most_bytes)
        self._say(self._admission.granted_bytes)
        return True

    def patience_s(self, now: float) -> float | None:
        """How long an idle engine may sleep before `settle` is due; None for ever."""
        if self.has_asked:
            return LOOK_EVERY_S
        if not self.has_loan:
            return None
        if self._spare_since is None:  # the last look was a moment before the last request ended
            return LOOK_EVERY_S
        return max(LOOK_EVERY_S, self._spare_since + self._loan_s - now)
