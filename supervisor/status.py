"""What the server looks like from outside: catalog, slots and workers' last words joined into the protocol's values. Pure."""

from supervisor.budget import gib
from supervisor.cache_plan import CachePlan, cache_state
from supervisor.catalog import CatalogEntry
from supervisor.dates import Dates
from supervisor.defaults import Default, longest_answer
from supervisor.fleet import WorkerProcess
from supervisor.protocol import Ready, SlotStatus, plain
from supervisor.settings import ModelSettings
from supervisor.slot_view import SlotView


def shed_warning(view: SlotView) -> str:
    features = " and ".join(view.shed)
    return f"{view.model} runs without {features}, with which it died twice; to try again: omlxctl reset {view.model}"


def peak_warning(view: SlotView) -> str:
    return (
        f"{view.model} is charged {gib(view.charged_bytes)}, {gib(view.past_peak_bytes)} of it for a peak that has passed; "
        f"it takes {gib(view.measured_bytes)} now; to leave the rest to others: omlxctl reset {view.model}"
    )


def slot_status(
    entry: CatalogEntry,
    view: SlotView | None,
    worker: WorkerProcess | None,
    *,
    cache: CachePlan,
    context: int,
    estimate_bytes: int,
    settings: ModelSettings,
    profiles: list[str],
    ttl_s: float | None,
    defaults: dict[str, Default],
    dates: Dates,
) -> SlotStatus:
    """One model as everybody sees it."""
    beat = plain(worker.beat) if worker and worker.beat else None
    return SlotStatus(
        id=entry.id,
        path=str(entry.path),
        base=entry.base,
        adapter=None if entry.adapter is None else str(entry.adapter),
        draft=None if entry.draft is None else entry.draft.name,
        state=view.state.value if view else "idle",
        context=context,
        weights_bytes=entry.files.weights_bytes,
        estimate_bytes=estimate_bytes,
        charged_bytes=view.charged_bytes if view else 0,
        measured_bytes=view.measured_bytes if view else 0,
        kv_granted_bytes=view.kv_granted_bytes if view else 0,
        hot_granted_bytes=view.hot_granted_bytes if view else 0,
        aliases=list(settings.aliases),
        profiles=profiles,
        profile=settings.profile,
        pinned=view.pinned if view else bool(settings.pinned),
        ttl_s=ttl_s,
        created=entry.files.created,
        gen=view.gen if view else 0,
        pid=worker.child.pid if worker else None,
        leases=view.leases if view else 0,
        waiting=view.waiting if view else 0,
        max_inflight=view.max_inflight if view else 0,
        stage=view.stage or None if view else None,
        done=view.done if view else 0,
        total=view.total if view else 0,
        since=dates.date(view.since) if view else 0.0,
        last_used=dates.date(view.last_used) if view and view.last_used > 0 else None,
        restarts=view.restarts if view else 0,
        last_error=view.last_error or None if view else None,
        shed=list(view.shed) if view else [],
        max_tokens=longest_answer(defaults, context),
        usable=entry.files.problem is None,
        problem=entry.files.problem,
        cache=cache_state(cache, worker.ready if worker else None, worker.beat if worker else None),
        slow=slow_because(worker.ready) if worker and worker.ready else None,
        beat=beat if isinstance(beat, dict) else None,  # pyright: ignore[reportUnknownArgumentType]
    )


def slow_because(ready: Ready) -> str | None:
    because = ready.capabilities.get("slow_because")
    return because if isinstance(because, str) else None
