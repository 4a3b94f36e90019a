"""Profiles in the settings: those of one model, the templates that all share, and which one is a model's default. Pure.

A profile is served by the worker that is there: what needs another one cannot be part of it.
"""

from collections.abc import Callable, Mapping
from typing import cast

from supervisor.defaults import FIELDS
from supervisor.settings import Leaf, ModelSettings, Profile

TEMPLATES = "model.profile_templates"

Parse = Callable[[Leaf, object, dict[str, object], list[str], str], None]
"""leaf, value, where to put it, problems, key path"""


def read_profiles(
    where: str,
    of_model: str,
    tables: Mapping[str, object],
    known: Mapping[str, Leaf],
    problems: list[str],
    *,
    parse: Parse,
    did_you_mean: Callable[[str, list[str]], str],
    templates: Mapping[str, Profile] | None = None,
) -> dict[str, Profile]:
    """`where` is the key path of all of them, `of_model` that of a model's own settings. A text names one of the templates."""
    profiles: dict[str, Profile] = {}
    for name, table in tables.items():
        path = f"{where}.{name}"
        if not name.strip() or ":" in name:
            problems.append(f"{path}: a profile's name is a text without a colon")
        if isinstance(table, str) and templates is not None:
            if table in templates:
                profiles[name] = templates[table]
            else:
                problems.append(f"{path}: there is no {table} in {TEMPLATES}{did_you_mean(table, list(templates))}")
            continue
        if not isinstance(table, dict):
            problems.append(f"{path}: an object is expected")
            continue
        profile: dict[str, object] = {}
        for key, value in cast("dict[str, object]", table).items():
            if key in FIELDS:
                parse(known[key], value, profile, problems, f"{path}.{key}")
            elif key in known:
                problems.append(f"{path}.{key}: not of a request; set it for the whole model: {of_model}.{key}")
            else:
                problems.append(f"{path}.{key}: unknown setting{did_you_mean(key, list(FIELDS))}")
        profiles[name] = profile
    return profiles


def profiles_of(model: ModelSettings, templates: Mapping[str, Profile] | None) -> dict[str, Profile]:
    """All that a model is served with; its own go before templates of the same name."""
    return {**(templates or {}), **(model.profiles or {})}


def unknown_defaults(models: Mapping[str, ModelSettings], templates: Mapping[str, Profile]) -> list[str]:
    """Every model whose default is a profile that it does not have."""
    problems: list[str] = []
    for model, settings in models.items():
        has = profiles_of(settings, templates)
        if settings.profile is not None and settings.profile not in has:
            problems.append(
                f"models.{model}.profile: there is no profile {settings.profile}; {', '.join(has) or 'none'} can be"
            )
    return problems
