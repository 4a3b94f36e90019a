"""The effective settings as they are shown: every value by key path as plain JSON, with its source. Secrets stay secret."""

import dataclasses
from typing import cast

from supervisor.settings import Leaf, leaves
from supervisor.settings_load import FILE, Loaded
from supervisor.settings_values import Size

HIDDEN = "(set)"
"""Stands for a secret that has a value."""


def effective(loaded: Loaded) -> dict[str, object]:
    """The answer of the verb `config`: values, sources, warnings, home."""
    values: dict[str, object] = {leaf.path: _value(loaded, leaf) for leaf in leaves()}
    sources = dict(loaded.sources)
    for model, of_model in loaded.settings.models.items():
        for field in dataclasses.fields(of_model):
            if (value := cast("object", getattr(of_model, field.name))) not in (None, ()):
                values[f"models.{model}.{field.name}"] = _plain(value)
                sources[f"models.{model}.{field.name}"] = FILE
    return {"values": values, "sources": sources, "warnings": loaded.warnings, "home": str(loaded.home)}


def _value(loaded: Loaded, leaf: Leaf) -> object:
    value = cast("object", getattr(getattr(loaded.settings, leaf.section), leaf.key))
    if leaf.setting.secret and value is not None:
        return HIDDEN
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, Size):
        return str(value)
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
