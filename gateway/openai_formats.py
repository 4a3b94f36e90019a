"""What an answer is to look like, as OpenAI and vLLM let clients say it, brought to the one form a worker takes.

Only shapes are looked at: whether a schema or grammar can be enforced is for the model's worker to say, before prefill.
"""

import json
from collections.abc import Callable
from typing import cast

from pydantic_core import PydanticCustomError

from gateway.openai_values import travels

Format = dict[str, object]


def as_response_format(value: object) -> Format | None:
    """OpenAI's. None is any text."""
    if value is None:
        return None
    given = _object(value)
    match given.get("type"):
        case "text":
            return None
        case "json_object" if given.get("schema") is None:
            return {"type": "json_object"}
        case "json_object":  # llama.cpp's way to give a schema
            return as_schema(given["schema"])
        case "json_schema":
            named = _object(given.get("json_schema"), "json_schema")
            return as_schema(_object(named.get("schema"), "json_schema.schema"))
        case kind:
            raise _wrong("type should be text, json_object or json_schema, not {kind}", kind=repr(kind))


def as_structured_outputs(value: object) -> Format | None:
    """vLLM's: exactly one of its ways."""
    if value is None:
        return None
    asked = {name: wanted for name, wanted in _object(value).items() if wanted not in (None, False)}
    if not asked:
        return None
    unknown = sorted(asked.keys() - _WAYS.keys())
    if unknown:
        raise _wrong("{name} is not supported by this server", name=unknown[0])
    if len(asked) > 1:
        raise _wrong("only one of {names} can be asked for", names=", ".join(sorted(asked)))
    ((name, wanted),) = asked.items()
    return _WAYS[name](wanted)


def as_schema(value: object) -> Format | None:
    """A JSON schema, or the text of one."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise _wrong("the schema is no JSON") from None
    if not isinstance(value, dict):
        raise _wrong("the schema should be an object")
    return {"type": "json_schema", "schema": travels(cast("dict[str, object]", value))}


def as_regex(value: object) -> Format | None:
    return None if value is None else {"type": "regex", "regex": _text(value)}


def as_grammar(value: object) -> Format | None:
    return None if value is None else {"type": "grammar", "grammar": _text(value)}


def as_choice(value: object) -> Format | None:
    if value is None:
        return None
    options = cast("list[object]", value) if isinstance(value, list) else []
    if not options or not all(isinstance(option, str) and option for option in options):
        raise _wrong("the choices should be a list of texts, none of them empty")
    return {"type": "choice", "choice": options}


def _json_object(value: object) -> Format | None:
    if value is not True:
        raise _wrong("json_object should be true or false")
    return {"type": "json_object"}


_WAYS: dict[str, Callable[[object], Format | None]] = {
    "json": as_schema,
    "regex": as_regex,
    "choice": as_choice,
    "grammar": as_grammar,
    "json_object": _json_object,
}


def _object(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        raise _wrong("{name} should be an object", name=name) if name else _wrong("Input should be an object")
    return cast("dict[str, object]", value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong("Input should be a text that is not empty")
    return value


def _wrong(template: str, **facts: str) -> PydanticCustomError:
    return PydanticCustomError("format", template, facts)  # pyright: ignore[reportArgumentType]  # a LiteralString there
