"""What omlxctl says about models while no server runs: the same answers as the verbs `models` and `model`, from the files."""

from typing import TYPE_CHECKING

from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home
from supervisor.protocol import SlotStatus, plain
from supervisor.settings_load import Loaded

if TYPE_CHECKING:
    from supervisor.catalog import Catalog, CatalogEntry
    from supervisor.roster import Roster


def listed(here: Home) -> dict[str, object]:
    dirs = here.model_dirs()
    catalog = catalog_of(here)
    return {
        "models": [_status(entry) | _profiles(here, entry.id) for entry in catalog.models],
        "skipped": [{"path": s.shown, "reason": s.reason} for s in catalog.skipped],
        "dirs": [str(d) for d in dirs],
    }


def shown(here: Home, model: str) -> dict[str, object]:
    """Raises `CommandFailed` when there is none of that name."""
    from supervisor.adapters import with_inherited
    from supervisor.defaults import NO_PROFILE, defaults_of
    from supervisor.settings_profiles import profiles_of

    entry = found(here, model)
    settings = with_inherited(here.loaded.settings, catalog_of(here))
    own = settings.of_model(model)
    has = profiles_of(own, settings.model.profile_templates)
    applied = has[own.profile] if own.profile else NO_PROFILE
    defaults = defaults_of(own, entry.files.generation, settings.sampling, applied=applied)
    plain_defaults = {name: {"value": d.value, "source": d.source} for name, d in defaults.items()}
    return _status(entry) | _profiles(here, model) | {"defaults": plain_defaults}


def _profiles(here: Home, model: str) -> dict[str, object]:
    from supervisor.settings_profiles import profiles_of

    own = here.loaded.settings.of_model(model)
    return {"profiles": list(profiles_of(own, here.loaded.settings.model.profile_templates)), "profile": own.profile}


def found(here: Home, model: str) -> "CatalogEntry":
    entry = catalog_of(here).get(model)
    if entry is None:
        raise CommandFailed(f"there is no model {model}; see: omlxctl models", Exit.NOT_FOUND)
    return entry


def catalog_of(here: Home) -> "Catalog":
    from supervisor.adapters import with_adapters, with_inherited
    from supervisor.catalog import scan
    from supervisor.drafts import with_drafts

    dirs = here.model_dirs()
    present = [d for d in dirs if d != here.paths.models or d.exists()]  # ours is made when it is first needed
    catalog = with_adapters(scan(present, here.loaded.settings.model_types), here.loaded.settings)
    return with_drafts(catalog, with_inherited(here.loaded.settings, catalog))


def roster_of(here: Home, loaded: Loaded) -> "Roster":
    """What a server with these settings would begin with."""
    from supervisor.roster import read_roster

    return read_roster(loaded.settings, here.paths, budget_bytes=0)


def _status(entry: "CatalogEntry") -> dict[str, object]:
    status = SlotStatus(
        id=entry.id,
        path=str(entry.path),
        base=entry.base,
        adapter=None if entry.adapter is None else str(entry.adapter),
        draft=None if entry.draft is None else entry.draft.name,
        state="not running",
        context=entry.files.context,
        weights_bytes=entry.files.weights_bytes,
        created=entry.files.created,
        usable=entry.files.problem is None,
        problem=entry.files.problem,
    )
    return {name: plain(getattr(status, name)) for name in status.__struct_fields__}
