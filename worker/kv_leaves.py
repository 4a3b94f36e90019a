"""The leaves of a model's cache: what kinds there are, and where the latest rows lie in the arrays of a live one.

Knows mlx_lm's cache classes by name, those of one sequence and those of a batch, as found in mlx-lm 0.32.2; no other file does
but `worker.lane_handover`. Must not know blocks or bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

import mlx.core as mx

from worker.mlx_types import Cache, CacheLeaf

_MODULE = "mlx_lm.models.cache"


class NotCacheable(Exception):
    """Why blocks of this model cannot be kept; the message is shown in status."""


class LeafKind(StrEnum):
    ROWS = "rows"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the last tokens."""
    STATE = "state"
    """Arrays that sum up all tokens so far: they cannot be cut, only copied as they are."""


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    """"3" is the fourth layer's cache, "3.1" the second part of it."""
    kind: LeafKind
    window: int | None
    detail: str
    """What else makes two leaves differ; part of the layout hash."""


class _Counted(Protocol):
    keys: mx.array
    offset: int


class _Rotating(Protocol):
    keys: mx.array
    values: mx.array
    offset: int
    max_size: int
    keep: int
    _idx: int


class _Batched(Protocol):
    keys: mx.array
    _idx: int
    rotated: bool


class _Chunked(Protocol):
    offset: int
    chunk_size: int
    start_position: int


class _Quantized(Protocol):
    keys: Sequence[mx.array]
    values: Sequence[mx.array]
    group_size: int
    bits: int


class _Arrays(Protocol):
    cache: list[mx.array | None]


class _Pair(Protocol):
    keys: object
    values: object


def leaves_of(cache: Sequence[CacheLeaf], path: str = "") -> Iterator[tuple[str, CacheLeaf]]:
    """Every leaf below, with its path; lists of caches are looked into."""
    for index, leaf in enumerate(cache):
        own = f"{path}{index}"
        if _name(leaf) == "CacheList":
            yield from leaves_of(cast("Sequence[CacheLeaf]", getattr(leaf, "caches")), f"{own}.")  # noqa: B009
        else:
            yield own, leaf


def bytes_of(cache: Sequence[CacheLeaf]) -> int:
    """What its arrays take, as far as the leaves say; asked at any moment, it never fails."""
    return sum(_bytes_of_leaf(leaf) for _, leaf in leaves_of(cache))


def _bytes_of_leaf(leaf: CacheLeaf) -> int:
    try:
        # Empty leaves are not asked: mlx_lm's quantized one raises then (0.32).
        return 0 if leaf.empty() else leaf.nbytes
    except (NotImplementedError, AttributeError):  # a class of the model's own: mlx_lm's base class leaves both open
        return 0


def why_serial(cache: Cache) -> str | None:
    """Why sequences of this model cannot share a batch; None where they can."""
    alone = next((leaf for _, leaf in leaves_of(cache) if not hasattr(leaf, "merge")), None)
    return None if alone is None else f"mlx-lm cannot batch {type(alone).__name__}"


def describe(path: str, leaf: CacheLeaf) -> Leaf:
    """Raises NotCacheable for a class whose content we cannot take apart."""
    match _name(leaf):
        case "KVCache":
            return Leaf(path, LeafKind.ROWS, None, "")
        case "QuantizedKVCache":
            quantized = cast("_Quantized", leaf)
            return Leaf(path, LeafKind.ROWS, None, f"{quantized.bits} bits in groups of {quantized.group_size}")
        case "RotatingKVCache":
            rotating = cast("_Rotating", leaf)
            if rotating.keep:
                raise NotCacheable(f"layer {path} keeps its first {rotating.keep} tokens beside a window")
            return Leaf(path, LeafKind.WINDOW, rotating.max_size, "")
        case "ChunkedKVCache":
            return Leaf(path, LeafKind.WINDOW, cast("_Chunked", leaf).chunk_size, "chunked")
        case "ArraysCache":
            present = [index for index, array in enumerate(arrays_of(leaf)) if array is not None]
            if not present:
                raise NotCacheable(f"layer {path} has an empty cache after a forward pass")
            return Leaf(path, LeafKind.STATE, None, f"{present} of {len(arrays_of(leaf))}")
        case name:
            raise NotCacheable(f"layer {path} uses {name}, whose content cannot be taken apart")


def arrays_of(leaf: CacheLeaf) -> list[mx.array | None]:
    """Of a STATE leaf."""
    return cast("_Arrays", leaf).cache


def parts_of(leaf: CacheLeaf) -> list[mx.array]:
    """Of a leaf with rows, live or not: arrays `[sequences, heads, columns, dim]`. NotCacheable while it is empty."""
    pair = cast("_Pair", leaf)
    parts: list[mx.array] = []
    for side in (pair.keys, pair.values):
        parts += [side] if isinstance(side, mx.array) else cast("Sequence[mx.array]", side or ())
    if not parts:
        raise NotCacheable("a layer has an empty cache after a forward pass")
    return parts


@dataclass(frozen=True, slots=True)
class Columns:
    """In time order the columns of an array are `turn`, `turn` + 1, … around its width; of these the first `end` are in use."""

    end: int
    turn: int


def columns_of(leaf: CacheLeaf) -> Columns:
    """Of a live leaf with rows. Its sequences are right-justified: the newest token of each is the last column in use."""
    match _name(leaf):
        case "BatchKVCache":
            return Columns(_index(leaf), 0)
        case "BatchRotatingKVCache":
            batched = cast("_Batched", leaf)
            width = batched.keys.shape[2]
            return Columns(width, _index(leaf) % width) if batched.rotated else Columns(_index(leaf), 0)
        case "RotatingKVCache":
            width, index = cast("_Rotating", leaf).keys.shape[2], _index(leaf)
            turned = index != width and index < cast("_Rotating", leaf).offset
            return Columns(width, index) if turned else Columns(index, 0)
        case "ChunkedKVCache":
            chunked = cast("_Chunked", leaf)
            return Columns(chunked.offset - chunked.start_position, 0)
        case _:
            return Columns(cast("_Counted", leaf).offset, 0)


def slice_row(array: mx.array, row: int, start: int, end: int, turn: int) -> mx.array:
    """`[1, heads, end - start, dim]` of one sequence; `start` and `end` count columns in time order."""
    width = array.shape[2]
    own = array[row : row + 1]
    first, stop = start + turn, end + turn
    if stop <= width:
        return own[:, :, first:stop, :]
    if first >= width:
        return own[:, :, first - width : stop - width, :]
    return mx.concatenate([own[:, :, first:, :], own[:, :, : stop - width, :]], axis=2)


def fill_rows(leaf: CacheLeaf, parts: Sequence[mx.array], tokens: int) -> None:
    """Makes a fresh leaf one that has seen `tokens` tokens, of which `parts` hold the latest."""
    half = len(parts) // 2
    pair = cast("_Pair", leaf)
    is_quantized = _name(leaf) == "QuantizedKVCache"
    pair.keys, pair.values = (tuple(parts[:half]), tuple(parts[half:])) if is_quantized else (parts[0], parts[1])
    cast("_Counted", leaf).offset = tokens
    rows = parts[0].shape[2]
    if _name(leaf) == "RotatingKVCache":
        setattr(leaf, "_idx", rows)  # noqa: B010
    elif _name(leaf) == "ChunkedKVCache":
        cast("_Chunked", leaf).start_position = tokens - rows


def _index(leaf: CacheLeaf) -> int:
    return cast("int", getattr(leaf, "_idx"))  # noqa: B009


def _name(leaf: CacheLeaf) -> str:
    """A class of another module is not what it may be called."""
    cls = type(leaf)
    return cls.__name__ if cls.__module__ == _MODULE else f"{cls.__module__}.{cls.__name__}"
