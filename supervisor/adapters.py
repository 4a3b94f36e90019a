"""LoRA adapters as models of their own: `base+name`, from directories that were found and from `models.BASE.adapters`.

Joins them to the catalog with the facts of their base, and says of each whether it can belong to that base as far as the
headers of both tell. Opens no tensor, needs no MLX.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from supervisor.catalog import ADAPTER_CONFIG as CONFIG
from supervisor.catalog import Catalog, CatalogEntry, Skipped
from supervisor.model_files import WEIGHTS, Damaged, sayable, stamp, tensor_shapes, weights_bytes_of
from supervisor.settings import ModelSettings, Settings

TENSORS, PEFT_TENSORS = "adapters.safetensors", "adapter_model.safetensors"
OWN_ONLY = frozenset({"aliases", "pinned", "adapters"})
"""What an adapter does not take over from its base."""
Shapes = Mapping[str, tuple[int, ...]]


def with_adapters(catalog: Catalog, settings: Settings) -> Catalog:
    """The catalog with all adapters; those of the settings go before those that were found. Never raises for what is there."""
    models = {entry.id: entry for entry in catalog.models}
    skipped = list(catalog.skipped)
    for base, name, path in _wanted(catalog, settings, skipped):
        entry = _entry(base, name, path)
        if (other := models.get(entry.id)) is None:
            models[entry.id] = entry
        elif other.adapter != path:
            skipped.append(Skipped(path, f"another model is already named {entry.id}: {other.own_path}"))
    return replace(catalog, models=tuple(models[name] for name in sorted(models)), skipped=tuple(skipped))


def with_inherited(settings: Settings, catalog: Catalog) -> Settings:
    """Every adapter has the settings of its base where it has none of its own."""
    models = dict(settings.models)
    for entry in catalog.models:
        if entry.base is not None:
            models[entry.id] = _inherited(settings.of_model(entry.id), settings.of_model(entry.base))
    return replace(settings, models=models)


def _inherited(own: ModelSettings, base: ModelSettings) -> ModelSettings:
    names = [field.name for field in dataclasses.fields(ModelSettings) if field.name not in OWN_ONLY]
    values = {name: getattr(base, name) for name in names if getattr(own, name) in (None, ())}
    return replace(own, **values)


def _wanted(catalog: Catalog, settings: Settings, skipped: list[Skipped]) -> Iterator[tuple[CatalogEntry, str, Path]]:
    for model, own in settings.models.items():
        for name, place in (own.adapters or {}).items():
            path = Path(place).expanduser().absolute()
            if (base := catalog.get(model)) is not None:
                yield base, name, path
            else:
                skipped.append(Skipped(path, f"it is an adapter of {model}, and there is no such model"))
    for name, path in catalog.adapters:
        wanted = _base_name(path)
        bases = [entry for entry in catalog.models if _is_called(entry, wanted)]
        if "+" in name:
            skipped.append(Skipped(path, "an adapter's name cannot hold a plus sign"))
        elif len(bases) == 1:
            yield bases[0], name, path
        else:
            which = f"an adapter of {wanted}" if wanted else "an adapter that does not name its model"
            there = f", which could be {' or '.join(entry.id for entry in bases)}" if bases else ""
            skipped.append(Skipped(path, f"it is {which}{there}; say which: config set models.MODEL.adapters"))


def _is_called(entry: CatalogEntry, wanted: str) -> bool:
    """Adapters are trained on `org/name` or on a path, and the same model may be here as `name`."""
    if not wanted:
        return False
    return entry.id == wanted or entry.id.rpartition("/")[2] == wanted.rstrip("/").rpartition("/")[2]


def _base_name(path: Path) -> str:
    try:
        return sayable(str(_config(path).get("model") or ""))
    except Damaged:
        return ""


def _entry(base: CatalogEntry, name: str, path: Path) -> CatalogEntry:
    own_bytes, changed, created, problem = 0, "", base.files.created, base.files.problem
    try:
        own_bytes = _checked(base, path)
        changed = stamp(path)
        created = path.stat().st_mtime
    except (Damaged, OSError) as e:
        problem = problem or f"its adapter {path} cannot be used: {e}"
    files = replace(
        base.files,
        weights_bytes=base.files.weights_bytes + own_bytes,
        changed=f"{base.files.changed}+{changed}",
        created=created,
        problem=problem,
    )
    return CatalogEntry(f"{base.id}+{name}", base.path, files, base=base.id, adapter=path)


def _checked(base: CatalogEntry, path: Path) -> int:
    """Bytes of the adapter's tensors. Raises Damaged when it cannot be one of that base."""
    _config(path)
    if not (path / TENSORS).is_file():
        peft = f"; {PEFT_TENSORS} is the format of another library" if (path / PEFT_TENSORS).is_file() else ""
        raise Damaged(f"it has no {TENSORS}{peft}")
    own = tensor_shapes(path / TENSORS)
    if base.files.problem is None:
        whole = {name: shape for shard in base.path.glob(WEIGHTS) for name, shape in tensor_shapes(shard).items()}
        for tensor, shape in own.items():
            _check_fit(base.id, tensor, shape, whole)
    return weights_bytes_of(path / TENSORS)


def _check_fit(base: str, tensor: str, shape: tuple[int, ...], whole: Shapes) -> None:
    """Where the base has a plain weight of that name. Where its names differ, as in checkpoints of others, the load decides."""
    module, _, part = tensor.rpartition(".")
    weight = whole.get(f"{module}.weight")
    if weight is None or len(weight) != 2 or len(shape) != 2:
        return
    is_quantized = f"{module}.scales" in whole
    rows_fit = part != "lora_b" or shape[1] == weight[0]
    columns_fit = part != "lora_a" or is_quantized or shape[0] == weight[1]
    # An embedding's adapter is the other way round.
    if not (rows_fit and columns_fit) and "embed" not in module:
        raise Damaged(f"{tensor} of shape {list(shape)} does not fit {module}.weight of {base}, which is {list(weight)}")


def _config(path: Path) -> Mapping[str, object]:
    try:
        found: object = json.loads((path / CONFIG).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise Damaged(f"its {CONFIG} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise Damaged(f"its {CONFIG} is no object")
    config = cast("dict[str, object]", found)
    if config.get("fine_tune_type", "lora") != "full" and not (
        isinstance(config.get("num_layers"), int) and isinstance(config.get("lora_parameters"), dict)
    ):
        raise Damaged(f"its {CONFIG} lacks num_layers or lora_parameters, which mlx-lm writes")
    return config
