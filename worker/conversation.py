"""Chat messages as clients send them, reshaped into what chat templates can render. Pure functions over plain JSON.

Templates differ in what they take: strings or parts, tool arguments as text or as objects, strict alternation or anything.
What a template cannot take as it is gets merged or moved, never dropped.
"""

import json
from collections.abc import Callable, Sequence
from typing import cast

Message = dict[str, object]
Messages = list[Message]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class UnsupportedPart(Exception):
    """A content part that is not text."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"content parts of type {kind!r} are not supported by this model")
        self.kind = kind


def normalised(messages: Sequence[Message], *, as_parts: bool) -> Messages:
    """OpenAI's shape in the one form templates agree on. Raises UnsupportedPart.

    Keys whose value is null are dropped (templates test for presence), `developer` is `system`, reasoning is there under the
    names templates read, tool arguments are objects, content is a string or, for templates that want it, a list of parts.
    """
    return [_normalised(message, as_parts=as_parts) for message in messages]


def _normalised(message: Message, *, as_parts: bool) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if "tool_calls" in plain:
        plain["tool_calls"] = [_with_object_arguments(call) for call in _list(plain["tool_calls"])]
    if "content" in plain or not plain.get("tool_calls"):
        text = _joined(plain.get("content", ""))
        plain["content"] = [{"type": "text", "text": text}] if as_parts else text
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _joined(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(cast("Message", part)) for part in _list(content))


def _part_text(part: Message) -> str:
    kind = str(part.get("type", "text"))
    if kind not in {"text", "refusal"}:
        raise UnsupportedPart(kind)
    return str(part.get(kind, ""))


def _with_object_arguments(call: object) -> object:
    """OpenAI carries arguments as a JSON string; most templates render an object."""
    return _with_arguments(call, _parsed)


def with_text_arguments(messages: Messages) -> Messages:
    """For the templates that concatenate tool arguments as text."""
    return [
        {**message, "tool_calls": [_with_arguments(call, _dumped) for call in _list(message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_arguments(call: object, change: Callable[[object], object]) -> object:
    if not isinstance(call, dict):
        return call
    fields = cast("Message", call)
    function = fields.get("function")
    if not isinstance(function, dict):
        return fields
    named = cast("Message", function)
    return {**fields, "function": {**named, "arguments": change(named.get("arguments", "{}"))}}


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed: object = json.loads(arguments)
    except ValueError:
        return arguments
    return cast("object", parsed) if isinstance(parsed, dict) else arguments


def _dumped(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def with_later_system_as_user(messages: Messages) -> Messages:
    """System messages after the beginning become user turns where they stand, and nothing else changes.

    Moving them to the front would change the prompt's beginning at every turn, and so would merging turns that were not merged
    before the first such note came: the prefix cache holds the conversation as it was rendered without it.
    """
    leading = 0
    while leading < len(messages) and messages[leading].get("role") == "system":
        leading += 1
    later = [{**message, "role": "user"} if message.get("role") == "system" else message for message in messages[leading:]]
    return messages[:leading] + later


def alternating(messages: Messages) -> Messages:
    """One system message at the start, then turns that alternate."""
    return _merged(with_later_system_as_user(messages))


def without_system(messages: Messages) -> Messages:
    """For templates without a system role: its text opens the first user turn."""
    return _merged([{**message, "role": "user"} if message.get("role") == "system" else message for message in messages])


def _merged(messages: Messages) -> Messages:
    merged: Messages = []
    for message in messages:
        if merged and _can_merge(merged[-1], message):
            merged[-1] = {**merged[-1], **message, "content": _concatenated(merged[-1]["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _can_merge(first: Message, second: Message) -> bool:
    mergeable = first.get("role") == second.get("role") and first.get("role") != "tool"
    return mergeable and "tool_calls" not in first and "tool_calls" not in second


def _concatenated(first: object, second: object) -> object:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first and second else first + second
    return _list(first) + _list(second)


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
