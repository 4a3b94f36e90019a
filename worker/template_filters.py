"""Jinja's filters whose result may be far larger than what they are given, behind `worker.template_limits`.

Knows their signatures; all other filters make at most a few times what they get.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from jinja2 import Environment
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext

from worker.template_limits import allow, check_format, check_join, check_replace, printed_size, size_of

Filter = Callable[..., object]


def bounded(filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Those filters with a check before them."""
    return {name: _behind(check, filters[name]) for name, check in _CHECKS.items()} | {"join": _joining(filters["join"])}


def _behind(check: Callable[..., None], own: Filter) -> Filter:
    @functools.wraps(own)  # jinja marks functions that want more than the value
    def checked(*args: object, **named: object) -> object:
        check(*(arg for arg in args if not isinstance(arg, EvalContext | Environment)), **named)
        return own(*args, **named)

    return checked


def _joining(own: Filter) -> Filter:
    @functools.wraps(own)
    def checked(context: EvalContext, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> object:
        items = list(value)
        if attribute is not None:
            items = list(map(cast("Callable[[object], object]", make_attrgetter(context.environment, attribute)), items))
        check_join(d, items)
        return own(context, items, d)

    return checked


def _center(value: object, width: int = 80) -> None:
    allow(size_of(value) + width)


def _indent(s: object, width: object = 4, *_: object, **__: object) -> None:
    lines = 1 + s.count("\n") if isinstance(s, str) else 1
    allow(size_of(s) + lines * (width if isinstance(width, int) else size_of(width)))


def _format(value: object, *args: object, **named: object) -> None:
    check_format(str(value), [*args, *named.values()])


def _replace(s: object, old: object, new: object, *_: object, **__: object) -> None:
    check_replace(str(s), [old, new])


def _batch(value: object, linecount: int, fill_with: object = None) -> None:
    allow(linecount)


def _slice(value: object, slices: int, fill_with: object = None) -> None:
    allow(slices)


def _wordwrap(s: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: object) -> None:
    allow(len(s) + (len(s) // max(1, width) + s.count("\n")) * len(wrapstring or "\n"))


def _printed(value: object, *_: object, **__: object) -> None:
    allow(printed_size(value))


_CHECKS: dict[str, Callable[..., None]] = {
    "center": _center,
    "indent": _indent,
    "format": _format,
    "replace": _replace,
    "batch": _batch,
    "slice": _slice,
    "wordwrap": _wordwrap,
    "string": _printed,
    "pprint": _printed,
    "escape": _printed,
    "e": _printed,
    "forceescape": _printed,
    "urlize": _printed,
    "trim": _printed,
    "upper": _printed,
    "lower": _printed,
    "title": _printed,
    "capitalize": _printed,
}
