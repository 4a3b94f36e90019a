"""Values of OpenAI request fields that come in more than one shape, each brought to the one the neutral request has.

Written as functions rather than unions, so that an error names the field and not a branch of a type.
"""

import re
from typing import TypeVar, cast

import msgspec
from pydantic_core import PydanticCustomError

from supervisor.protocol import Prompt

MAX_PROMPTS = 128
T = TypeVar("T")


def as_stops(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


def as_logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be an object of token ids and numbers")
    bias: dict[int, float] = {}
    for token, weight in cast("dict[str, object]", value).items():
        if not re.fullmatch(r"\d{1,9}", token):
            raise PydanticCustomError("logit_bias", "{token} is not a token id", {"token": token})
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not -100 <= weight <= 100:
            raise PydanticCustomError("logit_bias", "the bias of {token} should be between -100 and 100", {"token": token})
        bias[int(token)] = float(weight)
    return bias


def as_template_kwargs(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be an object")
    return travels(cast("dict[str, object]", value))


def travels(value: T) -> T:
    """JSON allows integers of any length, the wire to the worker 64 bits."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise PydanticCustomError("int_size", "Integers should fit in 64 bits") from None
    return value


Content = str | list[dict[str, object]] | None


def as_content(value: object) -> Content:
    """A string, null, or text parts, stripped to what a chat template reads."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "Input should be a string or a list of content parts")
    return [_part(number, part) for number, part in enumerate(cast("list[object]", value))]


def _part(number: int, value: object) -> dict[str, object]:
    part = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise PydanticCustomError("part_type", "part {number}: {kind} should be a string", {"number": number, "kind": kind})
        return {"type": "text", "text": text}
    if isinstance(kind, str):
        raise PydanticCustomError(
            "unsupported",
            "part {number}: {kind} content is not supported by this server",
            {"number": number, "kind": kind},
        )
    raise PydanticCustomError("part_type", "part {number} should be an object with a type", {"number": number})


def as_prompts(value: object) -> list[Prompt]:
    """Text, token ids, or several of either: one neutral prompt each."""
    if isinstance(value, str):
        return [Prompt(text=value)]
    items = cast("list[object]", value) if isinstance(value, list) else []
    if items and all(isinstance(item, str) for item in items):
        prompts = [Prompt(text=cast(str, item)) for item in items]
    elif _is_ids(items):
        prompts = [Prompt(ids=[cast("list[int]", items)])]
    elif items and all(isinstance(item, list) and _is_ids(cast("list[object]", item)) for item in items):
        prompts = [Prompt(ids=[cast("list[int]", item)]) for item in items]
    else:
        raise PydanticCustomError("prompt_type", "Input should be a string, token ids, or a non-empty list of either")
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("too_long", "at most {limit} prompts per request", {"limit": MAX_PROMPTS})
    return prompts


def _is_ids(items: list[object]) -> bool:
    return bool(items) and all(type(item) is int and 0 <= item < 2**31 for item in items)
