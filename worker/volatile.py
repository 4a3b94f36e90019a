"""Lines that coding agents change with every request at the head of the system prompt: removed, or no prefix would ever repeat.

Only the head of the leading system messages is looked at, line by line, and only lines that begin with a configured prefix go:
the same text further down, or from a user, is the conversation's own. Pure functions over OpenAI's message shape.
"""

from collections.abc import Sequence
from typing import cast

from worker.conversation import Message, Messages

SYSTEM_ROLES = frozenset({"system", "developer"})


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
