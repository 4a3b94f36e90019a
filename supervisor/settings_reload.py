"""What a reload takes over: of the new settings all but those that only a start can change, which stay as they are. Pure."""

import dataclasses
from dataclasses import dataclass
from typing import cast

from supervisor.settings import SECTIONS, leaves, value_of
from supervisor.settings_load import Loaded


@dataclass(frozen=True, slots=True)
class Reload:
    """The settings from now on, the key paths that changed, and those that will have when the server is started again."""

    loaded: Loaded
    changed: list[str]
    restart: list[str]


def flags_of(loaded: Loaded) -> dict[str, object]:
    """What the command line said, which still goes before everything else."""
    return {path: value_of(loaded.settings, path) for path, source in loaded.sources.items() if source.startswith("flag")}


def take_over(old: Loaded, new: Loaded) -> Reload:
    differing = [leaf for leaf in leaves() if value_of(old.settings, leaf.path) != value_of(new.settings, leaf.path)]
    restart = [leaf.path for leaf in differing if leaf.setting.applies == "start"]
    kept: dict[str, object] = {}
    for section in SECTIONS:
        values = {p.split(".")[1]: value_of(old.settings, p) for p in restart if p.startswith(f"{section}.")}
        kept[section] = dataclasses.replace(cast("object", getattr(new.settings, section)), **values)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]  # every section is a dataclass
    settings = dataclasses.replace(new.settings, **kept)  # pyright: ignore[reportArgumentType]  # by section, as above
    sources = {**new.sources, **{path: old.sources[path] for path in restart}}
    of_models = [
        f"models.{m}"
        for m in sorted({*old.settings.models, *new.settings.models})
        if old.settings.of_model(m) != new.settings.of_model(m)
    ]
    changed = [leaf.path for leaf in differing if leaf.path not in restart] + of_models
    return Reload(dataclasses.replace(new, settings=settings, sources=sources), changed, restart)
