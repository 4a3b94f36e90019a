"""Draft models: what `models.ID.draft_model` stands for, a model of the catalog or a directory, and why it is none.

Opens no tensor. Whether both have the same tokens only the worker knows, which opens both tokenizers.
"""

from dataclasses import replace
from pathlib import Path

from supervisor.catalog import Catalog, CatalogEntry, Draft
from supervisor.model_files import ModelFiles, NotAModel, read_model
from supervisor.settings import Settings


class _Unusable(Exception):
    pass


def with_drafts(catalog: Catalog, settings: Settings) -> Catalog:
    """The catalog with every draft model beside its model, and with the models whose draft there is not as unusable."""
    return replace(catalog, models=tuple(_with_draft(entry, catalog, settings) for entry in catalog.models))


def _with_draft(entry: CatalogEntry, catalog: Catalog, settings: Settings) -> CatalogEntry:
    name = settings.of_model(entry.id).draft_model
    if name is None:
        return entry
    try:
        return replace(entry, draft=_found(name, entry, catalog, settings))
    except _Unusable as e:
        problem = entry.files.problem or f"its draft_model {name} cannot be used: {e}"
        return replace(entry, files=replace(entry.files, problem=problem))


def _found(name: str, large: CatalogEntry, catalog: Catalog, settings: Settings) -> Draft:
    owner = next((model for model, own in settings.models.items() if name in own.aliases), name)
    entry = catalog.get(name) or catalog.get(owner)
    if entry is None:
        return Draft(name, *_in_directory(name))
    if entry.id == large.id:
        raise _Unusable("it is the model itself")
    if entry.adapter is not None:
        raise _Unusable("it is an adapter")
    if entry.files.problem is not None:
        raise _Unusable(entry.files.problem)
    return Draft(entry.id, entry.path, entry.files, settings.of_model(entry.id).model_type)


def _in_directory(name: str) -> tuple[Path, ModelFiles]:
    path = Path(name).expanduser()
    if not path.is_absolute() or not path.is_dir():
        raise _Unusable("there is no model of that name, nor is it the path of a directory")
    try:
        files = read_model(path)
    except (NotAModel, OSError) as e:
        raise _Unusable(str(e)) from e
    if files.problem is not None:
        raise _Unusable(files.problem)
    return path, files
