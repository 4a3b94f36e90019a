"""Reads what a model directory says of itself: config, weights' headers, sampling defaults. Opens no tensor, needs no MLX."""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from supervisor.settings import ModelSettings, leaves_of
from supervisor.settings_values import Refused

WEIGHTS = "model*.safetensors"
"""What mlx_lm loads; a directory may hold the same weights again under another name (consolidated.safetensors)."""
PARTS = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
"""Of the files a model is made of: weights, configuration, tokenizer, chat template, code."""
MAX_HEADER_BYTES = 100 * 2**20
"""The limit of the safetensors format itself."""
LARGEST = 2**40
"""Of a context or of a token's KV. Products of what is larger fit no message, and with them the whole status would not."""
DEFAULT_CONTEXT_TOKENS = 4096
"""For the few models whose config names no limit."""

SAMPLING = {leaf.key: leaf for leaf in leaves_of("models.ID", ModelSettings)}

_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def sayable(text: str) -> str:
    """What files hold, as messages can carry it: without halves of characters."""
    return text.encode(errors="replace").decode()


class _Told(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(sayable(message))


class NotAModel(_Told):
    """The directory is something else; the message says what is missing."""


class Damaged(_Told):
    """It is a model, but it cannot be served as it is."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts read from the files of one model directory."""

    context: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_element_bytes: int
    created: float
    changed: str
    """Another one when any of the files that make up the model is written, replaced or taken away."""
    generation: Mapping[str, object] = field(default_factory=dict[str, object])
    """generation_config.json's sampling defaults under the names of `protocol.Sampling`, and max_tokens."""
    problem: str | None = None


def read_model(directory: Path, model_type: str | None = None) -> ModelFiles:
    """The facts of `directory`; damage is reported in `problem`. A `model_type` that is given goes before what it says.

    Raises:
        NotAModel: no config.json of a text generation model, or no weights.
    """
    config = _config(directory, model_type)
    shards = sorted(directory.glob(WEIGHTS))
    if not shards:
        others = ", named model*.safetensors as mlx_lm wants them" if any(directory.glob("*.safetensors")) else ""
        raise NotAModel(f"it has a config.json but no .safetensors weights{others}")
    text = cast("dict[str, object]", config.get("text_config") if isinstance(config.get("text_config"), dict) else config)
    problem: str | None = None
    weights_bytes, dtype_bytes = 0, 2
    try:
        weights_bytes, dtype_bytes = _weights(directory, shards)
        _tokenizer(directory)
    except Damaged as e:
        problem = str(e)
    named = _first_int(text, config, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    context, kv_bytes = named or DEFAULT_CONTEXT_TOKENS, _kv_bytes_per_token(text, dtype_bytes)
    if max(context, kv_bytes) > LARGEST:
        problem = problem or "its config.json names sizes that no model has"
    return ModelFiles(
        context=min(context, LARGEST),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=min(kv_bytes, LARGEST),
        kv_element_bytes=dtype_bytes,
        created=directory.stat().st_mtime,
        changed=stamp(directory),
        generation=_generation(directory),
        problem=problem,
    )


def stamp(directory: Path) -> str:
    """Of the files as they are now. A copy that keeps the time of its original may be older than what it replaces."""
    found: list[tuple[str, int, int]] = []
    for file in sorted((*directory.iterdir(), *directory.glob("additional_chat_templates/*.jinja"))):
        with contextlib.suppress(OSError):
            if file.suffix in PARTS and file.is_file():
                at = file.stat()
                found.append((file.name, at.st_size, at.st_mtime_ns))
    return hashlib.sha256(repr(found).encode(errors="replace")).hexdigest()[:16]


def _config(directory: Path, model_type: str | None) -> dict[str, object]:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        raise NotAModel("it has no config.json") from None
    except (OSError, ValueError, RecursionError) as e:
        raise NotAModel(f"its config.json cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise NotAModel("its config.json names no model_type")
    config = cast("dict[str, object]", config)
    if model_type is not None:
        return config
    if not isinstance(config.get("model_type"), str):
        raise NotAModel("its config.json names no model_type")
    named = config.get("architectures")
    architectures = cast("list[object]", named) if isinstance(named, list) else []
    if architectures and not any("ForCausalLM" in str(a) or "ForConditionalGeneration" in str(a) for a in architectures):
        raise NotAModel(f"{architectures[0]} is not a text generation model")
    return config


def _weights(directory: Path, shards: list[Path]) -> tuple[int, int]:
    """Bytes of all tensors, and the element size of the most common kind by bytes among floats."""
    by_dtype: dict[str, int] = {}
    for shard in shards:
        for dtype, n in _shard(shard).items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + n
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {str(v) for v in cast("dict[str, object]", json.loads(index.read_bytes())["weight_map"]).values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise Damaged(f"{index.name} cannot be read: {e}") from e
        if missing := sorted(named - {s.name for s in shards}):
            raise Damaged(f"{len(missing)} of its weight files are missing: {', '.join(missing[:3])}")
    floats = {d: n for d, n in by_dtype.items() if d in ("F32", "F16", "BF16")}
    element = _DTYPE_BYTES[max(floats, key=lambda d: floats[d])] if floats else 2
    return sum(by_dtype.values()), element


def weights_bytes_of(path: Path) -> int:
    """Bytes of all tensors of one safetensors file. Raises Damaged."""
    return sum(_shard(path).values())


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """By name, of one safetensors file. Raises Damaged."""
    return {tensor.name: tensor.shape for tensor in _header(path)}


def _shard(path: Path) -> dict[str, int]:
    """Bytes per dtype of one safetensors file. Raises Damaged."""
    found: dict[str, int] = {}
    for tensor in _header(path):
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.stop - tensor.start
    return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _header(path: Path) -> list[_Tensor]:
    """What one safetensors file holds; raises `Damaged` when it is shorter than its header says."""
    if path.exists() and not path.is_file():  # reading a pipe would never end
        raise Damaged(f"{path.name} is no file")
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size_bytes:
                raise Damaged(f"{path.name} is cut short or no safetensors file")
            tensors = _tensors(json.loads(file.read(header_bytes)))
    except (OSError, struct.error, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise Damaged(f"{path.name} cannot be read: {type(e).__name__}: {e}") from e
    whole_bytes = 8 + header_bytes + max((tensor.stop for tensor in tensors), default=0)
    if size_bytes < whole_bytes:
        raise Damaged(f"{path.name} is cut short: {size_bytes} bytes, its header says {whole_bytes}")
    return tensors


def _tensors(header: dict[str, dict[str, object]]) -> list[_Tensor]:
    """Raises whatever a header of another shape makes it raise."""
    found: list[_Tensor] = []
    for name, tensor in header.items():
        if name != "__metadata__":
            start, stop = (int(offset) for offset in cast("list[int]", tensor["data_offsets"]))
            if not 0 <= start <= stop:
                raise ValueError(f"{name} lies at {start} to {stop}")
            shape = tuple(int(size) for size in cast("list[int]", tensor["shape"]))
            found.append(_Tensor(name, str(tensor["dtype"]), shape, start, stop))
    return found


def _tokenizer(directory: Path) -> None:
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise Damaged("it has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")


def _kv_bytes_per_token(text: Mapping[str, object], element_bytes: int) -> int:
    layers = _first_int(text, text, "num_hidden_layers", "n_layer", "n_layers")
    heads = _first_int(text, text, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _first_int(text, text, "num_key_value_heads") or heads
    hidden = _first_int(text, text, "hidden_size", "n_embd", "dim")
    head_dim = _first_int(text, text, "head_dim") or (hidden // heads if heads else 0)
    return layers * kv_heads * head_dim * 2 * element_bytes


def _first_int(first: Mapping[str, object], second: Mapping[str, object], *keys: str) -> int:
    for source in (first, second):
        for key in keys:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _generation(directory: Path) -> dict[str, object]:
    file = directory / "generation_config.json"
    try:
        raw = json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(raw, dict):
        return {}
    raw = cast("dict[str, object]", raw)
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "max_new_tokens": "max_tokens"}
    names["repetition_penalty"] = "repetition_penalty"
    found = {ours: raw[theirs] for theirs, ours in names.items() if _is_said_by_requests(ours, raw.get(theirs))}
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _is_said_by_requests(name: str, value: object) -> bool:
    """A default that no request could ask for would make every request fail that does not ask for another."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        SAMPLING[name].setting.parse(value)
    except Refused:
        return False
    return True
