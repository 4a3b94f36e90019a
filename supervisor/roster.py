"""The catalog joined with the settings: what a model costs to load, how its worker is set up, what its requests default to."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from supervisor import budget, settings_names, slot_events
from supervisor.adapters import with_adapters, with_inherited
from supervisor.cache_plan import CachePlan, plan_cache
from supervisor.catalog import Catalog, CatalogEntry, scan
from supervisor.defaults import NO_PROFILE, Default, defaults_of
from supervisor.drafts import with_drafts
from supervisor.load_options import LoadOptions, load_options, without_features
from supervisor.paths import Paths
from supervisor.protocol import Assign, CacheGrant, Grants, ModelRef
from supervisor.settings import Profile, Settings
from supervisor.settings_profiles import profiles_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name in a request stands for."""

    entry: CatalogEntry
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """Answers questions about models under one version of catalog and settings."""

    catalog: Catalog
    settings: Settings
    cache_dir: Path
    budget_bytes: int
    extra_costs: tuple[slot_events.ModelCost, ...] = field(default=())
    """Work that is no model but takes memory like one: an import."""

    def context(self, entry: CatalogEntry) -> int:
        limit = self.settings.of_model(entry.id).context
        return min(limit, entry.files.context) if limit else entry.files.context

    def resolve(self, name: str) -> Resolved | None:
        """What a request's model name stands for; none, or with `model.fallback` an unknown one, for the default model."""
        default = self.settings.model.default
        if default is not None and not name:
            return self.named(default)
        found = self.named(name)
        return self.named(default) if found is None and default is not None and self.settings.model.fallback else found

    def named(self, name: str) -> Resolved | None:
        """Exact id, alias, either with a profile, or with an adapter of that model."""
        if (found := self._named(name)) is not None:
            return found
        base, _, adapter = name.rpartition("+")
        entry = self._model(base)
        return None if entry is None else self._named(f"{entry.id}+{adapter}")

    def _named(self, name: str) -> Resolved | None:
        if (entry := self._model(name)) is not None:
            return Resolved(entry)
        model, profile = settings_names.parted(name) or (name, "")
        entry = self._model(model)
        if entry is None or profile not in self.profiles(entry.id):
            return None
        return Resolved(entry, profile)

    def _model(self, name: str) -> CatalogEntry | None:
        if (entry := self.catalog.get(name)) is not None:
            return entry
        owner = next((model for model, settings in self.settings.models.items() if name in settings.aliases), None)
        return self.catalog.get(owner) if owner is not None else None

    def clashes(self) -> list[str]:
        """Aliases that are the id of a model; without them in the settings every name means one thing."""
        ids = [entry.id for entry in self.catalog.models]
        return settings_names.clashes(self.settings.models, ids, self.settings.model.profile_templates or ())

    def unknown(self) -> list[str]:
        """Names in the settings that nothing goes by: no error, for the model may be on a disk that is not there now."""
        model, ids = self.settings.model, {entry.id for entry in self.catalog.models}
        named = [("model.default", model.default)] if model.default is not None else []
        named += [("model.preload", name) for name in model.preload]
        problems = [f"{key}: there is no model {name}" for key, name in named if self.named(name) is None]
        return problems + [f"models.{name}: there is no such model" for name in sorted(set(self.settings.models) - ids)]

    def profiles(self, model: str) -> dict[str, Profile]:
        """Its own and the templates that all models share."""
        return profiles_of(self.settings.of_model(model), self.settings.model.profile_templates)

    def defaults(self, entry: CatalogEntry, profile: str | None = None) -> dict[str, Default]:
        model = self.settings.of_model(entry.id)
        has = self.profiles(entry.id)
        chosen, applied = (has.get(name, NO_PROFILE) if name else NO_PROFILE for name in (profile, model.profile))
        return defaults_of(model, entry.files.generation, self.settings.sampling, chosen, applied)

    def ttl_s(self, model: str) -> float | None:
        """How long it may be idle; None = for ever."""
        own = self.settings.of_model(model).ttl_s
        return (self.settings.model.ttl_s if own is None else own) or None

    def max_batch(self, model: str) -> int:
        return self.settings.of_model(model).max_concurrent_requests or self.settings.scheduler.max_concurrent_requests

    def cache_plan(self, model: str) -> CachePlan:
        return plan_cache(self.settings.cache, self.settings.of_model(model), self.budget_bytes)

    def load_sum(self, entry: CatalogEntry) -> budget.LoadSum:
        return self.options(entry).load_sum(entry.files, self.context(entry))

    def options(self, entry: CatalogEntry) -> LoadOptions:
        return load_options(self.settings.of_model(entry.id), entry.draft)

    def estimate_bytes(self, entry: CatalogEntry) -> int:
        """Without its hot cache, which is given what is free."""
        return self.load_sum(entry).total_bytes

    def costs(self) -> tuple[slot_events.ModelCost, ...]:
        return tuple(self._cost(entry) for entry in self.catalog.models) + self.extra_costs

    def _cost(self, entry: CatalogEntry) -> slot_events.ModelCost:
        load_sum = self.load_sum(entry)
        cost = slot_events.ModelCost(
            entry.id,
            load_sum.total_bytes,
            load_key=self.load_key(entry),
            pinned=bool(self.settings.of_model(entry.id).pinned),
            ttl_s=self.ttl_s(entry.id),
            load_detail=str(load_sum),
            weights_bytes=load_sum.weights_bytes,
            kv_bytes=load_sum.kv_floor_bytes,
            hot_bytes=self.cache_plan(entry.id).hot_bytes,
        )
        features = self.options(entry).features
        if not features:
            return cost
        bare = self.without_features(entry.id)
        return replace(cost, features=features, without=bare._cost(replace(entry, draft=None)))

    def without_features(self, model: str) -> "Roster":
        """The same, had nobody asked for optional features of that model."""
        models = dict(self.settings.models)
        models[model] = without_features(self.settings.of_model(model))
        entries = tuple(replace(entry, draft=None) if entry.id == model else entry for entry in self.catalog.models)
        return replace(self, settings=replace(self.settings, models=models), catalog=replace(self.catalog, models=entries))

    def load_key(self, entry: CatalogEntry) -> str:
        """Changes when a running worker would have to be loaded anew to honour files and settings."""
        assign = self.assignment(entry, 0, "")
        facts = [
            [str(path.resolve()) for path in (entry.path, entry.adapter) if path is not None],
            entry.files.weights_bytes,
            entry.files.changed,
            self.context(entry),
            assign.max_batch,
            assign.settings,
            self.options(entry).facts(),
            [assign.cache.dir, assign.cache.block, assign.cache.hot_bytes, assign.cache.dtype],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def assignment(self, entry: CatalogEntry, gen: int, data_endpoint: str, hot_bytes: int | None = None) -> Assign:
        """`hot_bytes` is what its hot cache is given of the most that it may have; None = all of it."""
        cache = self.settings.cache
        plan = self.cache_plan(entry.id)
        own = self.settings.of_model(entry.id).trust_remote_code
        trust = self.settings.model.trust_remote_code if own is None else own
        kv_bytes = self.load_sum(entry).kv_floor_bytes
        return Assign(
            kind="text",
            gen=gen,
            data_endpoints=[data_endpoint],
            model=ModelRef(
                id=entry.id,
                path=str(entry.path),
                context=self.context(entry),
                adapter=None if entry.adapter is None else str(entry.adapter),
            ),
            max_batch=self.max_batch(entry.id),
            grants=Grants(kv_bytes=kv_bytes, hot_bytes=hot_bytes),
            cache=CacheGrant(
                dir=str(self.cache_dir) if plan.on_disk else None,
                block=cache.block_tokens,
                hot_bytes=plan.hot_bytes,
                dtype=plan.ssd_dtype,
            ),
            settings={
                "trust_remote_code": trust,
                "model_type": self.settings.of_model(entry.id).model_type,
                **self.options(entry).worker_settings(),
                "volatile_headers": list(cache.volatile_headers),
                "volatile_markers": list(cache.volatile_markers),
                "warm_start": cache.warm_start,
                "max_gap_ms": self.settings.scheduler.max_gap_ms,
                "self_check": self.settings.scheduler.self_check,
                "stalled_step_s": self.settings.scheduler.stalled_step_s,
                "kv_loan_s": self.settings.scheduler.kv_loan_s,
                "prefill_turns": self.settings.scheduler.prefill_turns != "off",
                "kv_ceiling_bytes": max(kv_bytes, self.budget_bytes - self.estimate_bytes(entry) + kv_bytes),
            },
        )


def read_roster(settings: Settings, paths: Paths, budget_bytes: int) -> Roster:
    """Looks through the model directories, ours first."""
    directories = [paths.models, *(Path(d).expanduser().absolute() for d in settings.model.model_dirs)]
    catalog = with_adapters(scan(directories, settings.model_types), settings)
    settings = with_inherited(settings, catalog)
    return Roster(with_drafts(catalog, settings), settings, paths.cache, budget_bytes)
