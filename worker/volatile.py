"""What coding agents change in the system prompt with every request: removed, or no prefix would ever repeat.

Headers stand at the head of the leading system messages: only lines there that begin with a configured prefix go. Markers, such
as `<total_tokens>900 tokens left</total_tokens>`, stand at the end of the system prompt, old ones before new ones, or in system
messages of their own between the turns: only what fills whole lines goes. The same text from a user or within a line is the
conversation's own. Pure functions over OpenAI's message shape.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from worker.conversation import Message, Messages

SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Volatile:
    headers: tuple[str, ...] = ()
    """Prefixes of lines."""
    markers: tuple[str, ...] = ()
    """Names of elements."""


def volatile_of(settings: Mapping[str, object]) -> Volatile:
    """What to remove, from a worker's assignment."""

    def texts(key: str) -> tuple[str, ...]:
        given = settings.get(key)
        return tuple(map(str, cast("list[object]", given))) if isinstance(given, list) else ()

    return Volatile(texts("volatile_headers"), texts("volatile_markers"))


def without_volatile(messages: Messages, volatile: Volatile) -> Messages:
    return without_volatile_headers(without_volatile_markers(messages, volatile.markers), volatile.headers)


def without_volatile_markers(messages: Messages, names: Sequence[str]) -> Messages:
    """Lines of nothing but such elements go from every system message, and the blank lines before them too: what is left must
    not tell how many there were. A message that was nothing else goes as well, unless it is the only one."""
    if not names:
        return messages
    stripped = [_unmarked(message, tuple(names)) for message in messages]
    return [now for now, before in zip(stripped, messages, strict=True) if now is before or now.get("content")] or stripped


def _unmarked(message: Message, names: tuple[str, ...]) -> Message:
    """The very same object when there was nothing to remove."""
    content = message.get("content")
    if message.get("role") not in SYSTEM_ROLES:
        return message
    if isinstance(content, str):
        shown: object = _without_markers(content, names)
    elif isinstance(content, list):
        shown = [left for part in cast("list[object]", content) if (left := _unmarked_part(part, names)) is not None]
    else:
        return message
    return message if shown == content else {**message, "content": shown}


def _unmarked_part(part: object, names: tuple[str, ...]) -> object | None:
    """None for a part that was nothing else."""
    if not isinstance(part, dict):
        return part
    fields = cast("Message", part)
    text = fields.get("text")
    if not isinstance(text, str) or (shown := _without_markers(text, names)) == text:
        return fields
    return {**fields, "text": shown} if shown else None


def _without_markers(text: str, names: tuple[str, ...]) -> str:
    if not any(f"<{name}>" in text for name in names):
        return text
    kept: list[str] = []
    for line in text.split("\n"):
        if not _marker_line(names).fullmatch(line):
            kept.append(line)
            continue
        while kept and not kept[-1].strip():
            kept.pop()
    return "\n".join(kept)


@functools.cache
def _marker_line(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\s*(?:<(?P<name>{'|'.join(map(re.escape, names))})>[^<>]*</(?P=name)>\s*)+")


def without_volatile_headers(messages: Messages, prefixes: Sequence[str]) -> Messages:
    """A message that was nothing else goes as well, unless it is the only one."""
    if not prefixes:
        return messages
    leading = 0
    while leading < len(messages) and messages[leading].get("role") in SYSTEM_ROLES:
        leading += 1
    stripped = [_stripped(message, tuple(prefixes)) for message in messages[:leading]]
    kept = [now for now, before in zip(stripped, messages, strict=False) if now is before or now.get("content")]
    return [*kept, *messages[leading:]] or stripped


def _stripped(message: Message, prefixes: tuple[str, ...]) -> Message:
    """The very same object when there was nothing to remove."""
    content = message.get("content")
    if isinstance(content, str):
        shown: object = _without_head(content, prefixes)
    elif isinstance(content, list):
        shown = _parts_without_head(cast("list[object]", content), prefixes)
    else:
        return message
    return message if shown == content else {**message, "content": shown}


def _parts_without_head(parts: list[object], prefixes: tuple[str, ...]) -> list[object]:
    """A part that is headers and nothing more uncovers the next one."""
    for index, part in enumerate(parts):
        text = cast("Message", part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            return parts[index:]
        shown = _without_head(text, prefixes)
        if shown or shown is text:
            return [{**cast("Message", part), "text": shown}, *parts[index + 1 :]]
    return []


def _without_head(text: str, prefixes: tuple[str, ...]) -> str:
    """The same string when its first line is no header. The blank lines that set headers apart go with them."""
    rest = text
    while rest.lstrip().startswith(prefixes):
        _, _, rest = rest.lstrip().partition("\n")
    return text if rest is text else rest.lstrip("\r\n")
