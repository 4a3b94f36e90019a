"""Reads oMLX's settings.json and says, key by key, what of it omlxd takes over and what not, and why.

Only reads: nothing of oMLX's directory is ever written. What a value of ours may be is settings.py's business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from supervisor.settings import leaves
from supervisor.settings_values import Refused

# What has the same meaning under the same or another name.
SAME: Mapping[str, str] = {
    "server.host": "server.host",
    "server.port": "server.port",
    "server.log_level": "server.log_level",
    "model.model_dirs": "model.model_dirs",
    "model.max_model_memory": "memory.max_model_memory",
    "scheduler.max_concurrent_requests": "scheduler.max_concurrent_requests",
    "cache.enabled": "cache.enabled",
    "cache.hot_cache_only": "cache.hot_cache_only",
    "cache.hot_cache_max_size": "cache.hot_cache_max_size",
    "cache.ssd_cache_dir": "cache.ssd_cache_dir",
    "cache.ssd_cache_max_size": "cache.ssd_cache_max_size",
    "memory.max_process_memory": "memory.max_process_memory",
    "memory.memory_guard_tier": "memory.memory_tier",
    "auth.api_key": "auth.api_key",
    "sampling.max_tokens": "sampling.max_tokens",
    "sampling.temperature": "sampling.temperature",
    "sampling.top_p": "sampling.top_p",
    "sampling.top_k": "sampling.top_k",
    "logging.log_dir": "logging.log_dir",
    "logging.retention_days": "logging.log_retention_days",
    "server.cors_origins": "server.cors_origins",
}
NO_SUCH = "omlxd has no such setting"


class ImportInvalid(Exception):
    """The file cannot be used at all, or holds values that no setting may have."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Taken:
    source: str
    """oMLX's key path."""
    target: str
    value: object
    note: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    taken: list[Taken] = field(default_factory=list[Taken])
    left: list[Left] = field(default_factory=list[Left])


def read_omlx(file: Path, omlx_home: Path) -> Found:
    """What `file` gives us. `omlx_home` is where oMLX keeps its own things.

    Raises:
        ImportInvalid: with every problem.
    """
    found = Found()
    problems: list[str] = []
    parsers = {leaf.path: leaf.setting.parse for leaf in leaves()}
    for source, value in _flat(_document(file)).items():
        verdict = _verdict(source, value, omlx_home)
        if isinstance(verdict, Left):
            found.left.append(verdict)
            continue
        try:
            parsers[verdict.target](verdict.value)
            found.taken.append(verdict)
        except Refused as e:
            problems.append(f"{source}: {e}, not {value!r}")
    if problems:
        raise ImportInvalid(problems)
    return found


def merged(document: Mapping[str, object], taken: list[Taken]) -> dict[str, object]:
    """Our settings document with the values taken over put in."""
    result = {key: dict(cast("dict[str, object]", v)) if isinstance(v, dict) else v for key, v in document.items()}
    for item in taken:
        section, key = item.target.split(".")
        cast("dict[str, object]", result.setdefault(section, {}))[key] = item.value
    return result


def _document(file: Path) -> dict[str, object]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ImportInvalid([f"{file}: {e}"]) from e
    if not isinstance(document, dict):
        raise ImportInvalid([f"{file}: an object is expected"])
    return cast("dict[str, object]", document)


def _flat(document: Mapping[str, object]) -> dict[str, object]:
    """`section.key: value`; the older single `model_dir` counts where there are no `model_dirs`."""
    flat: dict[str, object] = {}
    for section, table in document.items():
        if section == "version":
            continue
        if isinstance(table, dict):
            flat |= {f"{section}.{key}": value for key, value in cast("dict[str, object]", table).items()}
        else:
            flat[section] = table
    single = flat.pop("model.model_dir", None)
    if single and not flat.get("model.model_dirs"):
        flat["model.model_dirs"] = [single]
    return flat


def _verdict(source: str, value: object, omlx_home: Path) -> Taken | Left:
    target = SAME.get(source)
    if target is None:
        return Left(source, NO_SUCH)
    if value in (None, "", []):
        return Left(source, "it is not set")
    match source:
        case "server.cors_origins" if value == ["*"]:
            return Left(source, "it lets every web page use the server, which is oMLX's default; set it here if you want that")
        case "server.host" if "," in str(value) or isinstance(value, list):
            return Left(source, "omlxd listens on one address; set server.host to 0.0.0.0 to be reached on all")
        case "cache.ssd_cache_dir" if _inside(str(value), omlx_home):
            return Left(source, f"it is oMLX's own cache: the formats differ, and omlxd writes nothing in {omlx_home}")
        case "logging.log_dir" if _inside(str(value), omlx_home):
            return Left(source, f"omlxd writes nothing in {omlx_home}")
        case "cache.hot_cache_max_size" if str(value).strip() == "0":
            return Taken(source, target, 0, "0 is off, as in oMLX")
        case "model.max_model_memory" | "memory.max_process_memory" if str(value).lower() == "disabled":
            return Left(source, "omlxd always keeps to a memory budget; without a limit of yours it finds its own")
        case _:
            return Taken(source, target, value)


def _inside(path: str, directory: Path) -> bool:
    real, root = Path(path).expanduser().resolve(), directory.expanduser().resolve()
    return real == root or root in real.parents
