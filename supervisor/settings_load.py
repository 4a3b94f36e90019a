"""Reads the settings from their four sources and says of every value where it came from, or lists everything that is wrong.

The only place that reads the environment.
"""

import difflib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from supervisor import settings_names
from supervisor.settings import (
    SECTIONS,
    CatalogSettings,
    Leaf,
    MemorySettings,
    ModelSettings,
    Profile,
    Settings,
    leaves,
    leaves_of,
)
from supervisor.settings_needs import contradictions, falling
from supervisor.settings_profiles import TEMPLATES, read_profiles, unknown_defaults
from supervisor.settings_values import Refused

FILE = "settings.json"
OTHER_VARIABLES = {"OMLX_HOME"}

Raw = dict[str, list[tuple[object, str]]]
"""By key path all that was given, with its source; the last counts, but the others must be acceptable too."""


class SettingsInvalid(Exception):
    """All that is wrong, one line per key path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid settings, the source of each value by key path, and what should be said about them."""

    settings: Settings
    home: Path
    sources: Mapping[str, str]
    warnings: list[str] = field(default_factory=list[str])


def home_of(environ: Mapping[str, str], home: Path | None = None) -> Path:
    given = Path(home or environ.get("OMLX_HOME") or "~/.omlxd")
    try:
        return given.expanduser().absolute()
    except RuntimeError as e:
        raise SettingsInvalid([f"OMLX_HOME ({given}): there is no home {given.parts[0]}"]) from e


def load(
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    home: Path | None = None,
    document: Mapping[str, object] | None = None,
) -> Loaded:
    """The effective settings. `flags` are by key path (`server.port`); `document` is tried in place of the file.

    Raises:
        SettingsInvalid: with every problem of all sources.
    """
    where = home_of(environ, home)
    problems: list[str] = []
    raw: Raw = {}
    if document is None:
        document = read_file(where / FILE, problems)
    known = {leaf.path: leaf for leaf in leaves()}
    models = _from_file(document, known, raw, problems)
    warnings = _from_environment(environ, known, raw)
    for path, value in (flags or {}).items():
        raw.setdefault(path, []).append((value, f"flag --{known[path].flag}"))
    sections = {name: _section(name, cls, raw, problems) for name, cls in SECTIONS.items()}
    templates = _templates(sections, problems)
    of_models = {model: _model(model, table, templates, problems) for model, table in models.items()}
    problems += settings_names.clashes(of_models, of_models, templates)
    problems += unknown_defaults(of_models, templates)
    for model, own in of_models.items():
        problems += contradictions(model, own, of_models.get(model.rpartition("+")[0], own))
    problems += falling(cast("MemorySettings", sections["memory"]))
    if problems:
        raise SettingsInvalid(problems)
    settings = Settings(**cast("dict[str, None]", sections), models=cast("Mapping[str, ModelSettings]", of_models))  # pyright: ignore[reportArgumentType]
    sources = {path: raw[path][-1][1] if path in raw else "default" for path in known}
    return Loaded(settings, where, sources, warnings)


def read_file(path: Path, problems: list[str]) -> dict[str, object]:
    """The settings document; {} when there is none."""
    try:
        document = json.loads(path.read_bytes())
        json.dumps(document, ensure_ascii=False).encode()  # names that no message could carry would make every answer fail
    except (FileNotFoundError, NotADirectoryError):  # an unusable home is reported when it is to be used
        return {}
    except (OSError, ValueError, RecursionError) as e:
        problems.append(f"{path}: {e}")
        return {}
    if not isinstance(document, dict):
        problems.append(f"{path}: an object is expected")
        return {}
    return cast("dict[str, object]", document)


def write_value(home: Path, document: Mapping[str, object]) -> None:
    """Replaces settings.json in one step, readable by its owner only: it may hold a key."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, name = tempfile.mkstemp(prefix=".settings-", dir=home)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
        Path(name).replace(home / FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _from_file(
    document: Mapping[str, object], known: Mapping[str, Leaf], raw: Raw, problems: list[str]
) -> dict[str, Mapping[str, object]]:
    models: dict[str, Mapping[str, object]] = {}
    for section, value in document.items():
        if section == "version":
            continue
        if section not in SECTIONS and section != "models":
            problems.append(f"{section}: unknown section{_did_you_mean(section, [*SECTIONS, 'models'])}")
        elif not isinstance(value, dict):
            problems.append(f"{section}: an object is expected")
        elif section == "models":
            for model, table in cast("dict[str, object]", value).items():
                if isinstance(table, dict):
                    models[model] = cast("dict[str, object]", table)
                else:
                    problems.append(f"models.{model}: an object is expected")
        else:
            for key, item in cast("dict[str, object]", value).items():
                path = f"{section}.{key}"
                if path in known:
                    raw.setdefault(path, []).append((item, FILE))
                else:
                    problems.append(f"{path}: unknown setting{_did_you_mean(path, list(known))}")
    return models


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Leaf], raw: Raw) -> list[str]:
    by_env = {leaf.env: leaf for leaf in known.values() if leaf.env}
    warnings: list[str] = []
    for name, value in environ.items():
        if not name.startswith("OMLX_") or name in OTHER_VARIABLES:
            continue
        if name in by_env:
            raw.setdefault(by_env[name].path, []).append((value, f"environment {name}"))
        else:
            warnings.append(f"unknown variable {name} is ignored{_did_you_mean(name, list(by_env))}")
    return warnings


def _section(name: str, cls: type, raw: Raw, problems: list[str]) -> object:
    values: dict[str, object] = {}
    for leaf in leaves_of(name, cls):
        for value, source in raw.get(leaf.path, []):
            _parse(leaf, value, values, problems, f"{leaf.path} ({source})")
    return cls(**values)


def _templates(sections: dict[str, object], problems: list[str]) -> Mapping[str, Profile]:
    """Those of the section `model`, whose fields are read here: they are the fields of a model's settings."""
    section = sections["model"]
    assert isinstance(section, CatalogSettings)
    known = {leaf.key: leaf for leaf in leaves_of("models.ID", ModelSettings)}
    given = section.profile_templates or {}
    read = read_profiles(TEMPLATES, "models.ID", given, known, problems, parse=_parse, did_you_mean=_did_you_mean)
    sections["model"] = replace(section, profile_templates=read or None)
    return read


def _model(model: str, table: Mapping[str, object], templates: Mapping[str, Profile], problems: list[str]) -> ModelSettings:
    known = {leaf.key: leaf for leaf in leaves_of(f"models.{model}", ModelSettings)}
    values: dict[str, object] = {}
    for key, value in table.items():
        if key in known:
            _parse(known[key], value, values, problems, known[key].path)
            if key == "profiles" and values.get(key):
                tables, path = cast("Mapping[str, object]", values[key]), f"models.{model}"
                values[key] = read_profiles(
                    f"{path}.profiles",
                    path,
                    tables,
                    known,
                    problems,
                    parse=_parse,
                    did_you_mean=_did_you_mean,
                    templates=templates,
                )
        else:
            problems.append(f"models.{model}.{key}: unknown setting{_did_you_mean(key, list(known))}")
    return ModelSettings(**values)  # pyright: ignore[reportArgumentType]  # parsed by the leaf of that name


def _parse(leaf: Leaf, value: object, values: dict[str, object], problems: list[str], where: str) -> None:
    try:
        values[leaf.key] = leaf.setting.parse(value)
    except Refused as e:
        problems.append(f"{where}: {e}" if leaf.setting.secret else f"{where}: {e}, not {value!r}")


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
