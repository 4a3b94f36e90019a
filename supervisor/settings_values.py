"""What a setting may be: each parser takes what a file, the environment or a flag gave and returns the value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

LARGEST = 2**53
"""Of whole numbers without a limit of their own; messages cannot carry all that JSON can."""


class Refused(Exception):
    """A value is not acceptable; the message says what would be."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share of some whole (`80%`)."""

    bytes: int | None = None
    share: float | None = None

    def of(self, whole_bytes: int) -> int:
        return self.bytes if self.bytes is not None else int(whole_bytes * (self.share or 0.0))

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share is not None else str(self.bytes)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(value: object) -> Size:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Size(bytes=value)
    text = str(value).strip()
    if m := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        if float(m[1]) <= 100:
            return Size(share=float(m[1]) / 100)
    elif m := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", text, re.IGNORECASE):
        return Size(bytes=int(float(m[1]) * _UNITS[m[2].upper()]))
    raise Refused("a size such as 32GB or 80% is expected")


def auto_or(parse: Callable[[object], object]) -> Callable[[object], object]:
    def parse_auto(value: object) -> object:
        return None if value is None or value == "auto" else parse(value)

    return parse_auto


def text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        if not _is_sayable(value):
            raise Refused("a text without null bytes and halves of characters is expected")
        return value.strip()
    raise Refused("a non-empty text is expected")


def _is_sayable(value: str) -> bool:
    """The environment and JSON can hold halves of characters, which no message and no file can."""
    return "\x00" not in value and value.encode(errors="replace").decode() == value


def place(value: object) -> str:
    """A path; `~` and `~user` stand for a home that there is."""
    path = text(value)
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise Refused(f"a path is expected, and there is no home {Path(path).parts[0]}") from None
    return path


def choice(*names: str) -> Callable[[object], object]:
    def parse(value: object) -> str:
        if str(value).lower() in names:
            return str(value).lower()
        raise Refused(f"one of {', '.join(names)} is expected")

    return parse


def switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise Refused("true or false is expected")


def whole(low: int, high: int | None = None) -> Callable[[object], object]:
    def parse(value: object) -> int:
        try:
            number = int(str(value)) if not isinstance(value, bool) else low - 1
        except ValueError:
            number = low - 1
        if not low <= number <= (LARGEST if high is None else high):
            raise Refused(f"a whole number from {low}{f' to {high}' if high is not None else ' up'} is expected")
        return number

    return parse


def one_of(*numbers: int) -> Callable[[object], object]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or str(value) not in map(str, numbers):
            raise Refused(f"one of {', '.join(map(str, numbers))} is expected")
        return int(str(value))

    return parse


def real(low: float, high: float) -> Callable[[object], object]:
    def parse(value: object) -> float:
        try:
            number = float(str(value)) if not isinstance(value, bool) else float("nan")
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise Refused(f"a number from {low:g} to {high:g} is expected")
        return number

    return parse


def each(parse: Callable[[object], object]) -> Callable[[object], object]:
    """A list; a plain text is split at commas, as environment variables give it."""

    def parse_list(value: object) -> tuple[object, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise Refused("a list is expected")
        return tuple(parse(item) for item in cast("list[object]", items))

    return parse_list


def places(value: object) -> Mapping[str, str]:
    """An object of paths, by names that can be part of a model's name."""
    found = {name.strip(): place(item) for name, item in table(value).items()}
    if any(not name or not name.isprintable() or set(name) & set("+:") for name in found):
        raise Refused("names without plus signs, colons and control characters are expected")
    return found


def table(value: object) -> Mapping[str, object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value)
    raise Refused("an object is expected")
