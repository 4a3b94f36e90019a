"""One change to settings.json: found by its key path, validated with everything else before anything is written, read back."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import cast

from supervisor.settings import SECTIONS, ModelSettings, leaves_of
from supervisor.settings_load import FILE, Loaded, SettingsInvalid, load, read_file, write_value
from supervisor.settings_lock import WAIT_S, NotWritten, changing

NAMING = (".aliases", ".profiles", ".adapters", ".profile_templates", ".model_dirs")
"""Settings that decide what a name means; only for them the models' files are looked through."""
OF_MODEL = tuple(leaf.key for leaf in leaves_of("models", ModelSettings))


def split(path: str) -> tuple[str, ...]:
    """`server.port` or `models.ID.key`, where ID may hold dots; raises `SettingsInvalid` for what names no setting."""
    section, _, rest = path.partition(".")
    model, dot, key = rest.rpartition(".")
    if section == "models" and dot and model:
        if key in OF_MODEL:
            return section, model, key
        raise SettingsInvalid([f"{path}: unknown setting; of a model there are {', '.join(OF_MODEL)}"])
    if section in SECTIONS and rest in {leaf.key for leaf in leaves_of(section, SECTIONS[section])}:
        return section, rest
    raise SettingsInvalid([f"{path}: unknown setting; omlxctl config show lists them all"])


def value_from(text: str) -> object:
    """JSON where it is that, else the text itself: `8`, `true`, `["a"]`, `32GB`."""
    try:
        return cast("object", json.loads(text))
    except ValueError:
        return text


def changed(document: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """`document` with that value, or without the key for None."""
    *tables, key = split(path)
    result = deepcopy(dict(document))
    table = result
    for name in tables:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SettingsInvalid([f"{name}: an object is expected"])
        table = cast("dict[str, object]", inner)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    return result


def set_value(
    home: Path,
    path: str,
    value: object,
    clashes: Callable[[Loaded], Sequence[str]] = lambda _: (),
    wait_s: float = WAIT_S,
) -> None:
    """Writes one value; None takes it away, so that the default holds. `clashes` says what is wrong with it beside the models.

    Raises:
        SettingsInvalid: the file as it is, or as it would be, is not valid; nothing is written.
        NotWritten: read back, it is another, or somebody else does not get done with a change.
    """
    with changing(home, wait_s):
        _set_value(home, path, value, clashes)


def _new_clashes(
    home: Path, before: Mapping[str, object], loaded: Loaded, clashes: Callable[[Loaded], Sequence[str]]
) -> list[str]:
    """Of several that there are, each can be put right by itself."""
    found = list(clashes(loaded))
    if not found:
        return []
    try:
        known = clashes(load({}, home=home, document=before))
    except SettingsInvalid:
        known = ()
    return [problem for problem in found if problem not in known]


def _set_value(home: Path, path: str, value: object, clashes: Callable[[Loaded], Sequence[str]]) -> None:
    problems: list[str] = []
    document = read_file(home / FILE, problems)
    if problems:
        raise SettingsInvalid(problems)
    fresh = changed(document, path, value)
    loaded = load({}, home=home, document=fresh)
    if path.endswith(NAMING) and (problems := _new_clashes(home, document, loaded, clashes)):
        raise SettingsInvalid(problems)
    write_value(home, fresh)
    if read_file(home / FILE, problems) != fresh:
        raise NotWritten(f"{home / FILE} does not hold what was just written")
