"""What requests came to, added up for `GET /metrics` when each is over. No label is an id, a key or what a client chose.

Counts from this gateway's start on, and outlives every worker. Knows no supervisor and no HTTP.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from gateway.records import CLIENT_LEFT, Record
from gateway.timings import Summary, summary_of
from gateway.trace import Step
from supervisor.protocol import OK

IN_LINE = (Step.QUEUED, Step.JOIN, Step.WAITING)
"""Where a request waits for others; a load is a step of its own."""
_GOOD = frozenset({"stop", "length", "tool_calls", OK})
_WAITED_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class Tallies:
    def __init__(self) -> None:
        disable_created_metrics()  # a second series per counter; the server's start time says the same
        self.registry = CollectorRegistry()
        self._requests = self._counter("omlxd_requests", "HTTP requests that are over.", "route", "status", "outcome")
        self._prompt = self._counter("omlxd_prompt_tokens", "Tokens of prompts, cached ones included.", "model")
        self._cached = self._counter("omlxd_cached_tokens", "Tokens of prompts that were not computed again.", "model", "tier")
        self._completion = self._counter("omlxd_completion_tokens", "Tokens of answers.", "model")
        self._steps = self._counter("omlxd_request_step_seconds", "What requests spent in each step.", "model", "step")
        self._queue = self._histogram("queue_seconds", "In line, before a model and inside it; loads left out.", _WAITED_S)
        self._first = self._histogram("first_token_seconds", "From a request's arrival to its first token.", _WAITED_S)
        self._token = self._histogram("token_seconds", "Per token after the first, as the mean of one request.", _TOKEN_S)
        self._total = self._histogram("seconds", "From a request's arrival to the end of its last answer.", _TOTAL_S)

    def add(self, record: Record) -> None:
        """Of one HTTP request that is over, with all its answers."""
        status = record.status or CLIENT_LEFT
        self._requests.labels(record.route, str(status), _outcome(record)).inc()
        answers = [trace for trace in record.answers if trace.outcome != OK]  # a probe of the cache is no answer
        if answers and record.over_at is not None:
            self._add_answers(record.model, summary_of(answers, record.received_at, record.over_at))

    def _add_answers(self, model: str, summary: Summary) -> None:
        self._prompt.labels(model).inc(summary.prompt_tokens)
        self._cached.labels(model, "ram").inc(summary.cached_hot)
        self._cached.labels(model, "ssd").inc(summary.cached_cold)
        self._completion.labels(model).inc(summary.completion_tokens)
        for step, took_s in summary.spent.items():
            self._steps.labels(model, step.value).inc(took_s)
        self._queue.labels(model).observe(sum(summary.spent.get(step, 0.0) for step in IN_LINE))
        self._total.labels(model).observe(summary.total_s)
        if summary.first_token_s is not None:
            self._first.labels(model).observe(summary.first_token_s)
        if summary.decode_tokens_per_s is not None:
            self._token.labels(model).observe(1 / summary.decode_tokens_per_s)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"omlxd_request_{name}", text, ("model",), buckets=buckets, registry=self.registry)


def _outcome(record: Record) -> str:
    """Of several answers the first that went wrong, if one did."""
    outcomes = [trace.outcome for trace in record.answers if trace.outcome]
    return record.code or next((outcome for outcome in outcomes if outcome not in _GOOD), next(iter(outcomes), OK))
