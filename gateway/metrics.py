"""GET /metrics in Prometheus' text format: the supervisor's status of this moment, and the gateway's own tallies.

Nothing is computed between two scrapes. docs/metrics.md lists the families.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from gateway.desk import DESK, Desk
from gateway.errors import ApiError
from supervisor.protocol import Beat, ServerStatus, SlotStatus

STATES = ("idle", "queued", "spawning", "loading", "ready", "draining", "stopping", "backoff", "failed")
LEVELS = ("none", "soft", "hard", "critical")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    name: str
    text: str
    of: Callable[[T], float]


SERVER: Sequence[Fact[ServerStatus]] = (
    Fact("omlxd_start_time_seconds", "When the server was started.", lambda s: s.started),
    Fact("omlxd_memory_budget_bytes", "What models may take now.", lambda s: s.budget_bytes),
    Fact("omlxd_memory_budget_most_bytes", "The same as decided at the start.", lambda s: s.budget_most_bytes),
    Fact("omlxd_memory_charged_bytes", "What models are charged with.", lambda s: s.charged_bytes),
    Fact("omlxd_memory_reserve_bytes", "Memory of the machine that no model gets.", lambda s: s.reserve_bytes),
    Fact("omlxd_memory_measured_bytes", "All processes of the server, as metered.", lambda s: s.measured_bytes),
    Fact("omlxd_memory_missing_bytes", "Of workers that are gone, and not seen to be back.", lambda s: s.missing_bytes),
    Fact("omlxd_warnings", "Warnings in the status of the server.", lambda s: len(s.warnings)),
    Fact("omlxd_restart_needed", "1: the server is about to start again in place.", lambda s: bool(s.restart_needed)),
)
MODEL: Sequence[Fact[SlotStatus]] = (
    Fact("omlxd_model_usable", "0: its files cannot be served.", lambda m: m.usable),
    Fact("omlxd_model_slow", "1: it is slower than this machine could be; the status says why.", lambda m: bool(m.slow)),
    Fact("omlxd_model_shed", "Optional features it runs without, as it died with them.", lambda m: len(m.shed)),
    Fact("omlxd_model_weights_bytes", "Of its files.", lambda m: m.weights_bytes),
    Fact("omlxd_model_charged_bytes", "Of the budget.", lambda m: m.charged_bytes),
    Fact("omlxd_model_measured_bytes", "Of its worker's process; 0: not measured.", lambda m: m.measured_bytes),
    Fact("omlxd_model_kv_granted_bytes", "What its worker may use for KV.", lambda m: m.kv_granted_bytes),
    Fact("omlxd_model_hot_granted_bytes", "What its worker may use for the cache in RAM.", lambda m: m.hot_granted_bytes),
    Fact("omlxd_model_leases", "Requests that a worker has.", lambda m: m.leases),
    Fact("omlxd_model_queued", "Requests in the supervisor's line.", lambda m: m.waiting),
)
WORKER: Sequence[Fact[Beat]] = (
    Fact("omlxd_worker_running", "Requests that are computed.", lambda b: b.running),
    Fact("omlxd_worker_waiting", "Requests in the worker's line, parked ones included.", lambda b: b.waiting),
    Fact("omlxd_worker_parked", "Requests that were begun and put aside.", lambda b: b.parked),
    Fact("omlxd_worker_busy_seconds", "Age of the engine's step at hand; 0 between two.", lambda b: b.busy_s),
    Fact("omlxd_worker_kv_bytes", "KV of running requests.", lambda b: b.kv_bytes),
    Fact("omlxd_worker_hot_bytes", "Prefix cache in RAM.", lambda b: b.hot_bytes),
    Fact("omlxd_worker_mlx_active_bytes", "MLX: arrays.", lambda b: b.mx_active_bytes),
    Fact("omlxd_worker_mlx_cache_bytes", "MLX: freed and kept.", lambda b: b.mx_cache_bytes),
    Fact("omlxd_worker_cache_trouble", "1: the prefix cache on disk is not in use.", lambda b: b.cache_trouble is not None),
)
WORKER_TOTALS: Sequence[Fact[Beat]] = (
    Fact("omlxd_worker_parks", "Times a request was put aside.", lambda b: b.parks),
    Fact("omlxd_worker_resumes", "Times a parked request went on.", lambda b: b.resumes),
    Fact("omlxd_worker_turns_passed_on", "Prefill turns given to a neighbour.", lambda b: b.turns_passed_on),
    Fact("omlxd_cache_asked_tokens", "Tokens of prompts looked up.", lambda b: b.cache.get("asked_tokens", 0)),
    Fact("omlxd_cache_evicted_blocks", "Blocks that left the RAM tier.", lambda b: b.cache.get("hot_evicted", 0)),
    Fact("omlxd_cache_refused_blocks", "Blocks the RAM tier had no room for.", lambda b: b.cache.get("hot_refused", 0)),
    Fact("omlxd_cache_written_blocks", "Blocks written to disk.", lambda b: b.cache.get("blocks_written", 0)),
    Fact("omlxd_cache_written_bytes", "Bytes written to disk.", lambda b: b.store_written_bytes),
    Fact("omlxd_cache_read_bytes", "Bytes read from disk.", lambda b: b.cache.get("bytes_read", 0)),
    Fact("omlxd_cache_read_seconds", "Time spent reading them.", lambda b: b.cache.get("read_us", 0) / 1e6),
)


@dataclass(frozen=True, slots=True)
class Split:
    """A counter with one label; `values` are the label's, and under which key a beat has each."""

    name: str
    text: str
    label: str
    values: Callable[[Beat], Mapping[str, int]]


def _chosen(**keys: str) -> Callable[[Beat], Mapping[str, int]]:
    return lambda beat: {label: beat.cache[key] for label, key in keys.items() if key in beat.cache}


def _reasons(prefix: str) -> Callable[[Beat], Mapping[str, int]]:
    """All keys that begin so: reasons are few, the store's own and the system's names for errors."""
    return lambda beat: {key.removeprefix(prefix): n for key, n in beat.cache.items() if key.startswith(prefix)}


WORKER_SPLITS: Sequence[Split] = (
    Split("omlxd_cache_hit_tokens", "Tokens found.", "tier", _chosen(ram="hot_tokens", ssd="cold_tokens")),
    Split("omlxd_cache_hit_blocks", "Blocks found.", "tier", _chosen(ram="hot_hits", ssd="cold_hits")),
    Split("omlxd_cache_missed_blocks", "Blocks not found on disk.", "reason", _reasons("miss_")),
    Split("omlxd_cache_dropped_blocks", "Blocks not written to disk.", "reason", _reasons("drop_")),
    Split("omlxd_cache_bad_blocks", "Blocks on disk put aside as damaged.", "reason", _reasons("bad_")),
    Split("omlxd_draft_tokens", "Tokens of a draft model.", "kind", lambda beat: beat.draft),
)


async def metrics(request: web.Request) -> web.Response:
    desk = request.app[DESK]
    try:
        server = msgspec.convert(await desk.status(), ServerStatus)
    except ApiError:
        server = None
    body = generate_latest(Families(_families(desk, server))) + generate_latest(desk.tallies.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


@dataclass(frozen=True, slots=True)
class Families:
    """As prometheus_client wants them."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _families(desk: Desk, server: ServerStatus | None) -> Iterator[Metric]:
    """Without the supervisor's answer those of the gateway only."""
    yield GaugeMetricFamily("omlxd_supervisor_up", "0: the supervisor did not answer this scrape.", float(server is not None))
    yield GaugeMetricFamily("omlxd_requests_inflight", "Answers that are not over.", desk.link.inflight)
    yield CounterMetricFamily("omlxd_ignored_fields", "Request fields without effect.", desk.ignored_fields.total())
    if server is not None:
        yield from _server(server)
        yield from _models(server.models)
        yield from _workers({m.id: msgspec.convert(m.beat, Beat) for m in server.models if m.beat is not None})


def _server(server: ServerStatus) -> Iterator[Metric]:
    yield InfoMetricFamily("omlxd_build", "What runs.", {"version": server.version})
    for fact in SERVER:
        yield GaugeMetricFamily(fact.name, fact.text, fact.of(server))
    level = GaugeMetricFamily("omlxd_memory_pressure", "1 for the level of now.", labels=["level"])
    _add_one_hot(level, [], LEVELS, server.pressure)
    yield level
    up = GaugeMetricFamily("omlxd_child_up", "1: it runs.", labels=["child"])
    restarts = CounterMetricFamily("omlxd_child_restarts", "Starts after the first.", labels=["child"])
    for child in server.children:
        up.add_metric([child.name], float(child.state == "running"))
        restarts.add_metric([child.name], child.restarts)
    yield from (up, restarts)


def _models(models: Sequence[SlotStatus]) -> Iterator[Metric]:
    state = GaugeMetricFamily("omlxd_model_state", "1 for the state of now.", labels=["model", "state"])
    loads = CounterMetricFamily("omlxd_model_loads", "Workers started for it.", labels=["model"])
    restarts = CounterMetricFamily("omlxd_model_restarts", "Workers that ended unasked.", labels=["model"])
    for model in models:
        _add_one_hot(state, [model.id], STATES, model.state)
        loads.add_metric([model.id], model.gen)
        restarts.add_metric([model.id], model.restarts)
    yield from (state, loads, restarts)
    for fact in MODEL:
        family = GaugeMetricFamily(fact.name, fact.text, labels=["model"])
        for model in models:
            family.add_metric([model.id], fact.of(model))
        yield family


def _workers(beats: Mapping[str, Beat]) -> Iterator[Metric]:
    """Of models that are loaded, as of the last heartbeat."""
    for kind, facts in ((GaugeMetricFamily, WORKER), (CounterMetricFamily, WORKER_TOTALS)):
        for fact in facts:
            family = kind(fact.name, fact.text, labels=["model"])
            for model, beat in beats.items():
                family.add_metric([model], fact.of(beat))
            yield family
    for split in WORKER_SPLITS:
        family = CounterMetricFamily(split.name, split.text, labels=["model", split.label])
        for model, beat in beats.items():
            for value, count in split.values(beat).items():
                family.add_metric([model, value], count)
        yield family


def _add_one_hot(family: GaugeMetricFamily, labels: Sequence[str], names: Sequence[str], current: str) -> None:
    for name in names:
        family.add_metric([*labels, name], float(name == current))
