"""Brings a model into memory on the engine thread and measures what one token of it costs.

Knows mlx_lm's loading functions and how they fail; must not know requests or caches of prefixes.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx import nn

from worker.admission import KvCost
from worker.checkpoint import Checkpoint
from worker.faults import LoadFailed, ModelUnloadable, code_of
from worker.job import LoadStage
from worker.kv_quantizing import KvQuantizing
from worker.memory import kv_cost
from worker.mlx_lm_import import tokenizers_later
from worker.mlx_types import Cache, LanguageModel, evaluate

WARM_TOKENS = 8
SLICE_BYTES = 128 << 20
"""Weights are read this many at a time, so that a load shows progress and can be told from one that hangs."""

Progress = Callable[[LoadStage, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: LanguageModel
    new_cache: Callable[[], Cache]
    """For a sequence that begins with its first token."""
    weights_bytes: int
    vocab_size: int
    """Width of the output layer, which may be padded beyond the tokenizer's."""
    kv_cost: KvCost
    warm_cache: Cache
    """What the warm-up forward left behind: shows kinds, shapes and dtypes of the leaves."""
    source_files: tuple[str, ...]
    """Python files that compute the KV values."""
    quantizing: KvQuantizing | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_cost.bytes_per_token

    def restored_cache(self) -> Cache:
        """To be filled with rows like those of `warm_cache`."""
        cache = self.new_cache()
        if self.quantizing is not None:
            self.quantizing.settle(cache, self.quantizing.start)
        return cache


def load(
    checkpoint: Checkpoint, progress: Progress, quantizing: KvQuantizing | None = None, *, trust_remote_code: bool = False
) -> LoadedModel:
    """Raises LoadFailed, or ModelUnloadable when another try is pointless."""
    try:
        model = _build(checkpoint, trust_remote_code)
        weights_bytes = _read_weights(model, progress)
        progress("warm", 0, 1)
        loaded = _warm(model, weights_bytes)
        return loaded if quantizing is None else _quantized(loaded, quantizing)
    except (RuntimeError, MemoryError) as e:
        raise LoadFailed(f"{checkpoint.path.name} could not be loaded: {e}", code_of(e)) from e


def _build(checkpoint: Checkpoint, trust_remote_code: bool) -> LanguageModel:
    from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType]

    try:
        instead = None if checkpoint.model_type is None else {"model_type": checkpoint.model_type}
        model = load_model(checkpoint.path, lazy=True, model_config=instead, trust_remote_code=trust_remote_code)[0]
    except KeyError as e:
        raise ModelUnloadable(f"{checkpoint.path.name}: config.json or weights lack {e}.") from e
    except (ValueError, TypeError, AttributeError, ImportError, FileNotFoundError) as e:
        raise ModelUnloadable(f"{checkpoint.path.name}: {e}") from e
    except SystemExit as e:  # mlx_lm's olmo, without ai2-olmo: it would end this thread, and nobody would hear of it
        architecture = checkpoint.config["model_type"]
        said = f"the code for {architecture!r} gave up; the worker's log may name a package that it needs"
        raise ModelUnloadable(f"{checkpoint.path.name}: {said}.") from e
    if checkpoint.adapter is not None:
        _put_on(checkpoint.adapter, model)
    return cast("LanguageModel", model)


def _put_on(adapter: Path, model: "nn.Module") -> None:
    with tokenizers_later():  # the package has mlx_lm's training in it
        from mlx_lm.tuner.utils import load_adapters

    try:
        load_adapters(model, str(adapter))
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as e:
        what = f"its adapter_config.json lacks {e}" if isinstance(e, KeyError) else str(e)
        raise ModelUnloadable(f"the adapter {adapter} cannot be put on this model: {what}") from e
    model.eval()  # its layers come in training mode, in which they drop values at random


def _read_weights(model: LanguageModel, progress: Progress) -> int:
    arrays = list(_arrays(model.parameters()))
    total_bytes = sum(array.nbytes for array in arrays)
    done_bytes = pending_bytes = 0
    batch: list[mx.array] = []
    progress("weights", 0, total_bytes)
    for array in arrays:
        batch.append(array)
        pending_bytes += array.nbytes
        if pending_bytes >= SLICE_BYTES or array is arrays[-1]:
            evaluate(batch)
            done_bytes, pending_bytes = done_bytes + pending_bytes, 0
            batch.clear()
            progress("weights", done_bytes, total_bytes)
    return total_bytes


def _arrays(tree: object) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in cast("Mapping[str, object]", tree).values():
            yield from _arrays(branch)
    elif isinstance(tree, list | tuple):
        for branch in cast("list[object]", tree):
            yield from _arrays(branch)


def _warm(model: LanguageModel, weights_bytes: int) -> LoadedModel:
    from mlx_lm.models.cache import make_prompt_cache  # pyright: ignore[reportUnknownVariableType]

    def new_cache() -> Cache:
        return cast("Cache", make_prompt_cache(model))  # pyright: ignore[reportArgumentType]  # structural type here, nn.Module there

    cache = new_cache()
    logits = model(mx.zeros((1, WARM_TOKENS), dtype=mx.int32), cache=cache)
    evaluate([logits])
    return LoadedModel(
        model=model,
        new_cache=new_cache,
        weights_bytes=weights_bytes,
        vocab_size=logits.shape[-1],
        kv_cost=kv_cost(cache),
        warm_cache=cache,
        source_files=_sources(model, cache),
    )


def _quantized(plain: LoadedModel, quantizing: KvQuantizing) -> LoadedModel:
    """The same model with quantized caches, once a forward pass has shown that its layers can use them."""

    def new_cache() -> Cache:
        cache = plain.new_cache()
        quantizing.settle(cache, 0)
        return cache

    cache = plain.new_cache()
    quantizing.quantize(cache)
    try:
        evaluate([plain.model(mx.zeros((1, WARM_TOKENS), dtype=mx.int32), cache=cache)])
    except (ValueError, TypeError, AttributeError, IndexError) as e:
        raise quantizing.refused(str(e)) from e
    early = plain.kv_cost if quantizing.start else None
    return replace(
        plain,
        new_cache=new_cache,
        warm_cache=cache,
        kv_cost=replace(kv_cost(cache), early=early, early_tokens=quantizing.start),
        source_files=_sources(plain.model, cache),
        quantizing=quantizing,
    )


def _sources(model: LanguageModel, cache: Cache) -> tuple[str, ...]:
    """The model's module and all of mlx_lm's models package that it draws on: kernels and layers live in other files."""
    found: set[str] = set()
    to_visit = {type(model).__module__, *(type(leaf).__module__ for leaf in cache), *_adapter_modules(model)}
    while to_visit:
        name = to_visit.pop()
        found.add(name)
        to_visit |= {used for used in _modules_used_by(name) if used.startswith("mlx_lm.models.")} - found
    files = [inspect.getsourcefile(sys.modules[name]) for name in sorted(found) if name in sys.modules]
    return tuple(file for file in files if file)


def _adapter_modules(model: LanguageModel) -> set[str]:
    """An adapter's layers are code of another package of mlx_lm."""
    modules = cast("list[object]", cast("nn.Module", model).modules())  # pyright: ignore[reportUnknownMemberType]
    return {name for name in (type(module).__module__ for module in modules) if name.startswith("mlx_lm.tuner.")}


def _modules_used_by(name: str) -> Iterator[str]:
    for value in vars(sys.modules[name]).values() if name in sys.modules else ():
        if inspect.ismodule(value):
            yield value.__name__
        elif inspect.isclass(value) or inspect.isfunction(value):
            yield value.__module__
