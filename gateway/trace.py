"""Where the time of one answer goes: the steps it was in, one after the other, each with the moment it began.

Kept in the gateway because it alone sees a request from its first byte to its last: the line in front of a model, every
attempt at a worker, and the death of one. Pure: moments are handed in (time.monotonic()); must not know sockets or HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from supervisor.protocol import Row, Timings, Usage

MAX_MARKS = 100
"""Of a request that waits while its model is loaded and crashes for hours: more of that is counted with the last one."""


class Step(StrEnum):
    RECEIVE = "receive"
    """The body is read and checked."""
    COUNT = "count"
    """Does the prompt fit, before a model is loaded for it."""
    QUEUED = "queued"
    """In the supervisor's line: for memory, for another model to go, or for a place."""
    LOAD = "load"
    JOIN = "join"
    """The worker serves, but has yet to find this gateway."""
    PREPARE = "prepare"
    """Template, tokens, grammar."""
    WAITING = "waiting"
    """In the worker's line."""
    RESTORE = "restore"
    """What the cache has of the prompt is brought back."""
    PREFILL = "prefill"
    DECODE = "decode"


NOTHING = Usage(prompt_tokens=0, completion_tokens=0)
_IN_LINE = (Step.QUEUED, Step.LOAD)


@dataclass(frozen=True, slots=True)
class Mark:
    step: Step
    at: float
    detail: str = ""


@dataclass(slots=True, eq=False)
class Trace:
    rid: str
    marks: list[Mark]
    outcome: str = ""
    """The first that is known of its end: a finish reason, or the code of what went wrong."""
    attempts: int = 1
    parks: int = 0
    draft: tuple[int, int] | None = None
    """Tokens that a draft model proposed, and how many of them were accepted."""
    """How often the worker put it aside, all choices together."""
    usage: Usage = NOTHING
    """Of its first choice; the prompt is that of all."""
    first_token_at: float | None = None
    over_at: float | None = None
    _tokens: dict[int, int] = field(default_factory=dict[int, int])

    def enter(self, step: Step, at: float, detail: str = "") -> None:
        last = self.marks[-1]
        full = len(self.marks) >= MAX_MARKS and step in _IN_LINE
        if self.over_at is None and not full and (last.step, last.detail) != (step, detail):
            self.marks.append(Mark(step, at, detail))

    def accept(self, usage: Usage, at: float) -> None:
        self.usage = usage
        self.enter(Step.WAITING, at)

    def output(self, row: Row, at: float) -> None:
        """A worker says with the first row and the last one what came before it took."""
        if row.timings is not None and row.choice == 0:
            self._retell(row.timings, has_token=row.tokens > 0)
        elif self.first_token_at is None and row.tokens:
            self.enter(Step.DECODE, at)
        if self.first_token_at is None and row.tokens:
            self.first_token_at = self.marks[-1].at if self.marks[-1].step is Step.DECODE else at
        self._tokens[row.choice] = row.tokens
        if row.usage is not None and row.choice == 0:
            self.usage = row.usage
        if row.finish is not None and row.timings is not None:
            self.parks += row.timings.parks
            proposed, accepted = row.timings.draft_proposed, row.timings.draft_accepted
            if proposed is not None and accepted is not None:
                before = self.draft or (0, 0)
                self.draft = (before[0] + proposed, before[1] + accepted)

    @property
    def completion_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(self._tokens.values())

    @property
    def decoded_tokens(self) -> int:
        """Without the first one of each choice, which is the prefill's work."""
        return sum(tokens - 1 for tokens in self._tokens.values() if tokens)

    def begin_again(self) -> None:
        """The worker is lost, and the client has seen nothing of the answer yet."""
        self.attempts += 1
        self.first_token_at = None
        self._tokens.clear()

    def note(self, outcome: str) -> None:
        self.outcome = self.outcome or outcome

    def end(self, outcome: str, at: float) -> None:
        if self.over_at is None:
            self.note(outcome)
            self.over_at = at

    def spans(self, now: float) -> Iterator[tuple[Mark, float]]:
        """Every step in turn, and the seconds it took; the last one of a request that is not over lasts until now."""
        ends = [*(mark.at for mark in self.marks[1:]), now if self.over_at is None else self.over_at]
        for mark, end in zip(self.marks, ends, strict=True):
            yield mark, max(0.0, end - mark.at)

    def spent(self, now: float) -> dict[Step, float]:
        """Seconds per step, of all attempts together."""
        spent: dict[Step, float] = {}
        for mark, took_s in self.spans(now):
            spent[mark.step] = spent.get(mark.step, 0.0) + took_s
        return spent

    def _retell(self, timings: Timings, *, has_token: bool) -> None:
        """From the moment the worker got it: what the worker measured is nearer to the truth than when its messages came."""
        begin = next((at for at, mark in reversed(list(enumerate(self.marks))) if mark.step is Step.PREPARE), None)
        if begin is None or self.over_at is not None:
            return
        del self.marks[begin + 1 :]
        at = self.marks[begin].at + timings.prepare_s
        stages = ((Step.WAITING, timings.queued_s), (Step.RESTORE, timings.restore_s), (Step.PREFILL, timings.prefill_s))
        for step, took_s in stages:
            if took_s > 0:
                self.marks.append(Mark(step, at))
            at += took_s
        if has_token:
            self.marks.append(Mark(Step.DECODE, at))
