"""Which models there are: looks through the model directories, names what it finds, says why it passed over the rest.

Finds three layouts: `DIR/name`, `DIR/org/name`, and the hub cache's `DIR/models--org--name/snapshots/REV`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from supervisor.model_files import ModelFiles, NotAModel, read_model

ADAPTER_CONFIG = "adapter_config.json"
NO_TYPES: Mapping[str, str] = MappingProxyType({})
GET_ONE_IN = "omlxctl models add DIR, or: omlxctl models import FILE.gguf"
"""What to tell whoever has no model yet."""
NOT_MODELS = ("datasets--", "spaces--")
"""How other downloads in the hub's cache begin."""
PROCESS_NAMES = frozenset({"omlxd", "gateway", "text", "janitor"})
"""`omlxctl logs` and `restart` take them beside model ids."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A smaller model that proposes tokens to a larger one."""

    name: str
    path: Path
    files: ModelFiles
    model_type: str | None = None
    """Where its own settings name one: its config.json has no say then."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    id: str
    path: Path
    files: ModelFiles
    base: str | None = None
    adapter: Path | None = None
    """A LoRA adapter's directory; `path` is then that of the model it is for, and `base` that model's id."""
    draft: Draft | None = None

    @property
    def own_path(self) -> Path:
        return self.adapter or self.path


@dataclass(frozen=True, slots=True)
class Skipped:
    path: Path
    reason: str

    @property
    def shown(self) -> str:
        return _shown(self.path)


@dataclass(frozen=True, slots=True)
class Catalog:
    models: tuple[CatalogEntry, ...]
    skipped: tuple[Skipped, ...]
    adapters: tuple[tuple[str, Path], ...] = ()
    """Directories with a LoRA adapter that were found, by name; adapters.py makes models of them."""

    def get(self, model: str) -> CatalogEntry | None:
        return next((entry for entry in self.models if entry.id == model), None)


def scan(directories: Sequence[Path], model_types: Mapping[str, str] = NO_TYPES) -> Catalog:
    """Everything below `directories`; the first of two models with one name wins. Never raises for what it finds there.

    `model_types` are those that the settings give, by name of the model; there config.json has no say.
    """
    models: dict[str, CatalogEntry] = {}
    skipped: list[Skipped] = []
    adapters: list[tuple[str, Path]] = []
    for directory in directories:
        for name, path in _candidates(directory, skipped):
            unusable = _unusable_name(name) or _unusable_path(path)
            if not (path / "config.json").is_file() and (path / ADAPTER_CONFIG).is_file():
                if unusable:
                    skipped.append(Skipped(path, unusable))
                else:
                    adapters.append((name, path))
                continue
            try:
                entry = CatalogEntry(name, path, read_model(path, model_types.get(name)))
            except (NotAModel, OSError) as e:
                skipped.append(Skipped(path, str(e)))
                continue
            if unusable:
                skipped.append(Skipped(path, unusable))
            elif name in models and _same(path, models[name].path):
                continue  # registered by a link, and in a directory that is served as a whole
            elif name in models:
                skipped.append(Skipped(path, f"another model is already named {name}: {models[name].path}"))
            else:
                models[name] = entry
    return Catalog(tuple(models[name] for name in sorted(models)), tuple(skipped), tuple(adapters))


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _shown(path: Path) -> str:
    """A name that is no UTF-8 fits no message."""
    return os.fsencode(path).decode(errors="replace")


def _unusable_name(name: str) -> str | None:
    if ":" in name:
        return "a model's name cannot hold a colon"
    if not name.isprintable():
        return "a model's name cannot hold control characters"
    if name in PROCESS_NAMES:
        return f"{name} is the name of one of the server's own processes"
    return None


def _unusable_path(path: Path) -> str | None:
    return None if _shown(path) == str(path) else "a model's path has to be UTF-8"


def _candidates(directory: Path, skipped: list[Skipped]) -> Iterator[tuple[str, Path]]:
    for place in [directory, *_children(directory, skipped)]:
        try:
            if place == directory:
                if _is_listed(directory):
                    yield directory.name, directory
                    return
            else:
                yield from _in_child(place, skipped)
        except OSError as e:  # a directory that may not be entered, a link that leads nowhere
            skipped.append(Skipped(place, f"it cannot be read: {e.strerror}"))


def _in_child(child: Path, skipped: list[Skipped]) -> Iterator[tuple[str, Path]]:
    if child.suffix == ".gguf":
        skipped.append(Skipped(child, f"a GGUF file has to be converted: omlxctl models import {_shown(child)}"))
    elif not child.is_dir():
        if child.is_symlink():
            skipped.append(Skipped(child, "it is a link to something that is not there"))
    elif child.name.startswith(NOT_MODELS):
        return
    elif child.name.startswith("models--"):
        yield from _hub_snapshot(child, skipped)
    elif _is_listed(child):
        yield child.name, child
    elif inner := [c for c in _children(child, skipped) if _is_listed(c)]:
        yield from ((f"{child.name}/{c.name}", c) for c in inner)
    elif gguf := next((file for depth in ("*.gguf", "*/*.gguf") for file in sorted(child.glob(depth))), None):
        skipped.append(Skipped(child, f"a GGUF file has to be converted: omlxctl models import {_shown(gguf)}"))
    else:
        skipped.append(Skipped(child, "it has no config.json, nor have the directories in it"))


def _is_listed(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def _hub_snapshot(repo: Path, skipped: list[Skipped]) -> Iterator[tuple[str, Path]]:
    name = repo.name.removeprefix("models--").replace("--", "/", 1)
    snapshots = _children(repo / "snapshots", skipped) if (repo / "snapshots").is_dir() else []
    try:
        main = (repo / "refs" / "main").read_text(errors="replace").strip()
    except OSError:
        main = ""
    chosen = next((s for s in snapshots if s.name == main), None) or max(
        snapshots, key=lambda s: s.stat().st_mtime, default=None
    )
    if chosen is None:
        skipped.append(Skipped(repo, "its download has no snapshot"))
    else:
        yield name, chosen


def _children(directory: Path, skipped: list[Skipped]) -> list[Path]:
    try:
        return sorted(child for child in directory.iterdir() if not child.name.startswith("."))
    except FileNotFoundError:
        skipped.append(Skipped(directory, "there is no such directory"))
    except OSError as e:
        skipped.append(Skipped(directory, f"it cannot be read: {e.strerror}"))
    return []
