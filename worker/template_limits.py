"""How large a value a chat template may make: what an expression would come to is estimated before it is computed.

`'a' * 10**9`, a width in a format or ten lines that double a string each take gigabytes in one step, where no count of what has
been rendered can stop them. Sizes in, a refusal out; must not know templates or conversations.
"""

import re
from collections.abc import Iterable, Sized
from typing import cast

import jinja2

MOST_ITEMS = 64 << 20
"""Characters of a string, items of a list: as much as a whole prompt may be rendered to."""
MOST_BITS = 1 << 16
"""Of a number: larger ones take ever longer to multiply and to print."""

_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+)?(?:\.(\d+))?|\{[^{}]*:[^{}\d]*(\d+)?(?:[^{}\d]+(\d+))?")
"""Widths and precisions of either kind of format string."""
_WIDTH_GIVEN = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""One that is among the values."""


class ValueTooLarge(jinja2.TemplateError):
    """The template wants to make a value that no prompt needs."""

    def __init__(self) -> None:
        super().__init__(f"an expression would make a value of more than {MOST_ITEMS} characters or items")


def allow(items: float) -> None:
    if items > MOST_ITEMS:
        raise ValueTooLarge


def size_of(value: object) -> int:
    """Characters or items; 0 for what has neither."""
    return len(cast("Sized", value)) if isinstance(value, str | bytes | list | tuple | dict) else 0


def printed_size(value: object) -> int:
    """At least so many characters are printed; what is in it many times is printed as often. Stops counting at the limit."""
    total, to_visit = 0, [value]
    while to_visit and total <= MOST_ITEMS:
        each = to_visit.pop()
        total += 1
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, dict):
            to_visit += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            to_visit += each
    return total


def numbers_in(values: Iterable[object]) -> int:
    """Their sum, as far as they are counts: widths, precisions and the like."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _allow_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise ValueTooLarge


def check_operator(operator: str, left: object, right: object) -> None:
    """Raises ValueTooLarge."""
    match operator, left, right:
        case ("*", int(), int()):
            _allow_bits(left.bit_length() + right.bit_length())
        case ("**", int(), int()):
            _allow_bits(left.bit_length() * max(0, right))
        case ("*", _, int()):
            allow(size_of(left) * max(0, right))
        case ("*", int(), _):
            allow(size_of(right) * max(0, left))
        case ("%", str() | bytes(), _):
            check_format(
                left if isinstance(left, str) else "",
                cast("tuple[object, ...]", right) if isinstance(right, tuple) else (right,),
            )
        case ("+", _, _):
            allow(size_of(left) + size_of(right))
        case _:
            pass


def check_format(form: str, values: Iterable[object]) -> None:
    """Of either kind of format string. Raises ValueTooLarge."""
    given = list(values)
    widths = sum(int(width) for found in _WIDTHS.findall(form) for width in found if width)
    widths += numbers_in(given) if _WIDTH_GIVEN.search(form) else 0
    # A value may be printed more than once.
    allow(len(form) + widths + sum(map(printed_size, given)) * (1 + form.count("{")))


def check_method(name: str, owner: object, values: Iterable[object]) -> None:
    """Of a built-in string. Raises ValueTooLarge."""
    given = list(values)
    match name, owner:
        case (("center" | "ljust" | "rjust" | "zfill"), _):
            allow(size_of(owner) + numbers_in(given))
        case "expandtabs", str():
            allow(len(owner) + owner.count("\t") * (numbers_in(given) or 8))
        case "replace", str():
            check_replace(owner, given)
        case "join", _:
            check_join(owner, given[0] if given else ())
        case "translate", _:
            allow(size_of(owner) * max([1, *(size_of(v) for table in given for v in _values(table))]))
        case (("format" | "format_map"), str()):
            check_format(owner, [item for value in given for item in (_values(value) or (value,))])
        case _:
            pass


def check_replace(text: str, given: list[object]) -> None:
    old, new = (value if isinstance(value, str) else "" for value in [*given, "", ""][:2])
    allow(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def check_join(separator: object, items: object) -> None:
    if isinstance(items, list | tuple | dict):
        allow(size_of(separator) * size_of(cast("object", items)) + printed_size(cast("object", items)))


def _values(value: object) -> tuple[object, ...]:
    return tuple(cast("dict[object, object]", value).values()) if isinstance(value, dict) else ()
