"""From a load spec to a scheduler that can serve: files checked, weights read, a lane built and run once.

Runs on the engine thread, and is the first module there that imports MLX.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from cachestore import int8
from cachestore.block import Block
from cachestore.keys import layout_id, weights_fingerprint
from cachestore.store import Namespace, Store
from supervisor.protocol import CacheGrant
from worker.admission import Admission
from worker.appetite import LOAN_S
from worker.checkpoint import Checkpoint, open_checkpoint
from worker.drafting import Counts, joined, open_draft
from worker.hot import HotTier
from worker.job import Loaded, LoadSpec, LoadStage, Sink, Text
from worker.kv import Layout
from worker.kv_leaves import NotCacheable, why_serial
from worker.kv_quantizing import KvQuantizing
from worker.lanes import Chunks, Lane
from worker.loader import WARM_TOKENS, LoadedModel, load
from worker.memory import limit_memory
from worker.meter import Meter
from worker.prefix import PrefixCache
from worker.sampling import greedy
from worker.scheduler import Scheduler
from worker.self_check import judge
from worker.serial_lane import SerialLane
from worker.speed_probe import facts_of, measure, weights_of
from worker.spill import Spill
from worker.warm_start import WarmStart

_log = logging.getLogger(__name__)
GPU_BLOCK_TOKENS, CPU_BLOCK_TOKENS = 256, 64
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 256
"""An abandoned request and a newly arrived one wait for at most this much: 1.4 s for a 135M model on 2 cores."""
GPU_BUSY_TOKENS, CPU_BUSY_TOKENS = 512, 128
"""The most that running streams wait for, however fast it goes."""
MAX_GAP_MS = 300.0
LANE_UIDS = 1 << 32
"""More than a lane will ever give out: lanes that become one must not share any."""


def bring_up(
    spec: LoadSpec, text: Text, sink: Sink, meter: Meter, progress: Callable[[LoadStage, int, int], None]
) -> tuple[Scheduler, Loaded]:
    """Raises LoadFailed."""
    started_at = time.monotonic()
    trust = bool(spec.settings.get("trust_remote_code"))
    adapter = None if spec.ref.adapter is None else Path(spec.ref.adapter)
    model_type = spec.settings.get("model_type")
    checkpoint = open_checkpoint(
        Path(spec.ref.path), adapter, trust_remote_code=trust, model_type=model_type if isinstance(model_type, str) else None
    )
    quantizing = KvQuantizing.of(spec.settings)
    model = load(checkpoint, progress, quantizing, trust_remote_code=trust)
    draft = open_draft(spec, model, progress)
    if draft is not None:
        model = joined(model, draft)
    chunks = chunk_sizes(spec.cache.block)

    alone = why_serial(model.warm_cache) if draft is None else "a draft model works for one at a time"

    numbers = itertools.count()
    admission = Admission(model.kv_cost, spec.grants.kv_bytes, int(_number(spec.settings, "kv_ceiling_bytes", 0)))

    def new_lane() -> Lane | SerialLane:
        first_uid = next(numbers) * LANE_UIDS
        lane = (
            Lane(model.model, spec.max_batch, chunks, first_uid)
            if alone is None
            else SerialLane(model.model, chunks, quantizing, draft)
        )
        limit_memory(model.weights_bytes, admission.granted_bytes)
        return lane

    prefix, why_not = open_prefix_cache(spec, checkpoint, model, chunks.block_tokens)
    _run_once(new_lane(), model)
    checked = check_speed(new_lane(), model, checkpoint) if spec.settings.get("self_check", True) else {}
    if draft is not None:
        draft.counts = Counts()  # nobody asked for those
    progress("warm", 1, 1)
    max_gap_s = _number(spec.settings, "max_gap_ms", MAX_GAP_MS) / 1000
    loan_s = _number(spec.settings, "kv_loan_s", LOAN_S)
    leased = bool(spec.settings.get("prefill_turns"))
    scheduler = Scheduler(model, prefix, text, sink, meter, new_lane, admission, max_gap_s, loan_s, turns_leased=leased)
    loaded = Loaded(
        context=context_of(spec, text),
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        peak_bytes=mx.get_peak_memory(),
        load_s=time.monotonic() - started_at,
        cache_namespace=None if prefix is None else prefix.namespace.fingerprint,
        cache_layout=None if prefix is None else prefix.namespace.layout,
        capabilities={
            "cache": prefix is not None,
            "cache_off_because": why_not,
            "cache_block_tokens": chunks.block_tokens,
            "one_at_a_time_because": alone,
            "draft_model": None if draft is None else draft.name,
            **checked,
        },
    )
    return scheduler, loaded


def open_prefix_cache(
    spec: LoadSpec, checkpoint: Checkpoint, model: LoadedModel, block_tokens: int
) -> tuple[PrefixCache | None, str | None]:
    """The cache, or None and why there is none."""
    grant = spec.cache
    if grant.dir is None and grant.hot_bytes <= 0:
        return None, "turned off"
    try:
        layout = Layout.of(model.warm_cache)
    except NotCacheable as e:
        return None, str(e)
    sources = [Path(file).read_bytes() for file in model.source_files]
    added = [] if model.quantizing is None else [model.quantizing.key]
    configs = [config.read_bytes() for config in checkpoint.configs]
    fingerprint = weights_fingerprint(checkpoint.weight_files, [*sources, *configs])
    namespace = Namespace(
        model=spec.ref.id,
        fingerprint=fingerprint,
        layout=layout_id([*layout.parts(), *added, f"block {block_tokens}".encode(), b"world 1", grant.dtype.encode()]),
        block_tokens=block_tokens,
    )
    spill = None if grant.dir is None else Spill(open_store(Path(grant.dir), namespace, grant), grant.write_credit)
    least_tokens = 0 if model.quantizing is None else model.quantizing.start
    return PrefixCache(namespace, layout, HotTier(hot_bytes(spec)), spill, model.restored_cache, least_tokens), None


def hot_bytes(spec: LoadSpec) -> int:
    """What the RAM tier may take for now; the most it ever gets is in the cache's grant."""
    granted_bytes = spec.grants.hot_bytes
    return spec.cache.hot_bytes if granted_bytes is None else min(granted_bytes, spec.cache.hot_bytes)


def warm_start(
    spec: LoadSpec, prefix: PrefixCache, deliver: Callable[[Sequence[Block]], None], is_busy: Callable[[], bool]
) -> WarmStart | None:
    """None where there is nothing to read from or nothing to read into, or the settings do not want it."""
    if spec.cache.dir is None or hot_bytes(spec) <= 0 or not spec.settings.get("warm_start"):
        return None
    store = open_store(Path(spec.cache.dir), prefix.namespace, spec.cache, read_only=True)  # its reads count as nobody's hits
    return WarmStart(store, hot_bytes(spec), deliver, is_busy)


def open_store(root: Path, namespace: Namespace, grant: CacheGrant, *, read_only: bool = False) -> Store:
    return Store(root, namespace, read_only=read_only, as_int8=grant.dtype == int8.NAME)


def context_of(spec: LoadSpec, text: Text) -> int:
    """The model's own context, lowered by what the settings allow."""
    limits = [spec.settings.get("context"), spec.ref.context]
    return min([text.context, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def chunk_sizes(block_tokens: int) -> Chunks:
    on_gpu = mx.default_device() == mx.Device(mx.DeviceType.gpu)
    block = block_tokens or (GPU_BLOCK_TOKENS if on_gpu else CPU_BLOCK_TOKENS)
    idle = max(1, (GPU_CHUNK_TOKENS if on_gpu else CPU_CHUNK_TOKENS) // block) * block
    busy = max(1, (GPU_BUSY_TOKENS if on_gpu else CPU_BUSY_TOKENS) // block) * block
    return Chunks(idle - idle % busy, busy, block)


def _number(settings: Mapping[str, object], name: str, default: float) -> float:
    value = settings.get(name)
    return value if isinstance(value, int | float) else default


def check_speed(lane: Lane | SerialLane, model: LoadedModel, checkpoint: Checkpoint) -> dict[str, object]:
    """What the worker says of its speed when it is ready; `slow_because` is None where there is nothing to say."""
    began_at = time.monotonic()
    weights = weights_of(model, checkpoint.config)
    facts = facts_of(model, weights)
    try:
        measured = measure(facts, weights, lane, model)
    except (RuntimeError, ValueError) as e:  # a kernel that this kind of weights has not got; the model itself has run already
        _log.warning("the model's speed could not be checked: %s", e)
        return {}
    verdict = judge(facts, measured)
    ratios = {"decode_ratio": verdict.decode_ratio, "prefill_ratio": verdict.prefill_ratio}
    numbers = {**asdict(measured), **ratios, "took_s": time.monotonic() - began_at}
    return {"slow_because": verdict.slow_because, "self_check": numbers}


def _run_once(lane: Lane | SerialLane, model: LoadedModel) -> None:
    """The first step of a process compiles kernels; better now than under a request's clock."""
    uid = lane.insert([0] * WARM_TOKENS, 0, model.new_cache(), greedy, [])
    while not lane.step():
        pass
    lane.remove([uid])
    lane.close()
