"""The last requests and what became of them: one record per HTTP request, one log line when it is over.

A bounded ring in the gateway's memory: it outlives every worker, and is empty again after the gateway itself was restarted.
Holds no prompt, no answer and no key.
"""

import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.timings import Summary, summary_of
from gateway.trace import Mark, Step, Trace

log = logging.getLogger("gateway.request")

KEPT = 1000
KEPT_ANSWERS = 4000
"""One request may ask for the answers to 128 prompts."""
NAME_CHARS = 128
CLIENT_LEFT = 499
"""As proxies write a request whose client did not wait for the status."""
_UNSAFE = re.compile(r"[^\w.\-:/+@]", re.ASCII)


@dataclass(slots=True, eq=False)
class Record:
    """`received_at` is monotonic, `received` a date."""

    id: str
    client_id: str
    """What the client called the request; anything, and not unique."""
    what: str
    received_at: float
    received: float
    route: str = ""
    """Which of our paths; `what` is as the client wrote it."""
    model: str = ""
    status: int | None = None
    code: str = ""
    """Of the error that it was answered with."""
    moved_at: float = 0.0
    """When its client last gave or took a part of a body."""
    answers: list[Trace] = field(default_factory=list[Trace])
    handled: bool = False
    over_at: float | None = None

    def answer(self, rid: str) -> Trace:
        trace = Trace(rid, [Mark(Step.RECEIVE, self.received_at)])
        self.answers.append(trace)
        return trace

    def is_called(self, rid: str) -> bool:
        """By its id, by that of its answer's body, or by the client's."""
        return safe(rid) == self.client_id or self.id == f"req_{re.sub('^(req_|chatcmpl-|cmpl-)', '', rid)}"

    def summary(self, now: float) -> Summary:
        return summary_of(self.answers, self.received_at, now if self.over_at is None else self.over_at)

    def plain(self, now: float) -> dict[str, object]:
        return {
            "id": self.id,
            "client_id": self.client_id or None,
            "what": self.what,
            "model": safe(self.model),
            "status": self.status,
            "error": self.code or None,
            "received": self.received,
            "is_over": self.over_at is not None,
            "timings": self.summary(now).body(),
            "answers": [_plain(trace, self.received_at, now) for trace in self.answers],
        }

    def line(self) -> str:
        now = self.received_at if self.over_at is None else self.over_at
        ids = self.id if not self.client_id else f"{self.id} ({self.client_id})"
        outcomes = list(dict.fromkeys(trace.outcome for trace in self.answers if trace.outcome)) or [self.code or "ok"]
        facts = f"{ids} {self.what} {self.status or CLIENT_LEFT} {','.join(outcomes)}"
        if self.model:
            facts += f" model={safe(self.model)}"
        return f"{facts} {self.summary(now).line()}"


class Records:
    def __init__(self, on_over: Callable[[Record], None] = lambda _: None) -> None:
        """`on_over` hears of every request, also of one that is not kept."""
        self._on_over = on_over
        self._kept: deque[Record] = deque()
        self._open: dict[Record, None] = {}
        """In order; not in the ring yet, so that nothing which runs is pushed out of it."""
        self._answers = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when one of `open` has come, gone, or got a model."""

    @property
    def open(self) -> Iterable[Record]:
        """Those that ask for something and are not over."""
        return self._open

    def begin(self, method: str, path: str, client_id: str, route: str = "") -> Record:
        """Only what asks for something is kept; looking is not."""
        what = f"{method} {safe(path)}"
        record = Record(f"req_{secrets.token_hex(12)}", safe(client_id), what, time.monotonic(), time.time(), route)
        if method == "POST":
            self._open[record] = None
            self.on_change()
        return record

    def find(self, rid: str) -> list[dict[str, object]]:
        now = time.monotonic()
        return [record.plain(now) for record in (*self._kept, *self._open) if rid and record.is_called(rid)]

    def named(self, record: Record, model: str) -> None:
        record.model = model
        self.on_change()

    def handled(self, record: Record) -> None:
        """Its handler has ended; a worker may still be at it."""
        record.handled = True
        if record in self._open:
            self.settle(record)
        elif record.over_at is None:
            record.over_at = time.monotonic()
            self._on_over(record)

    def settle(self, record: Record) -> None:
        """Call when its handler or one of its answers is over."""
        if record in self._open and record.handled and all(trace.over_at is not None for trace in record.answers):
            self._close(record)

    def close(self) -> None:
        """The gateway ends: what is not over will not be."""
        for record in list(self._open):
            self._close(record)

    def _close(self, record: Record) -> None:
        del self._open[record]
        self._kept.append(record)
        record.over_at = time.monotonic()
        log.info("%s", record.line())
        self._on_over(record)
        self.on_change()
        self._answers += len(record.answers)
        while len(self._kept) > KEPT or self._answers > KEPT_ANSWERS:
            self._answers -= len(self._kept.popleft().answers)


def safe(text: str) -> str:
    """What a client chose, fit for a line of a log."""
    return _UNSAFE.sub("?", text[:NAME_CHARS])


def _plain(trace: Trace, received_at: float, now: float) -> dict[str, object]:
    return {
        "rid": trace.rid,
        "outcome": trace.outcome or None,
        "attempts": trace.attempts,
        "parks": trace.parks,
        "prompt_tokens": trace.usage.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "cached_ram_tokens": trace.usage.cached_hot,
        "cached_ssd_tokens": trace.usage.cached_cold,
        "steps": [
            {"step": mark.step.value, "detail": mark.detail, "at_s": mark.at - received_at, "took_s": took_s}
            for mark, took_s in trace.spans(now)
        ],
    }
