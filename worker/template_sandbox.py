"""Jinja as chat templates expect it, and nothing more: transformers' extensions, filters and globals in the immutable sandbox.

Knows nothing of conversations; what a template may do is decided here and only here.
"""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateError where the source is not a template."""
    return _environment().from_string(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast("dict[str, object]", environment.globals).update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
    )
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its content is rendered as it stands."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # jinja declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _TemplateDict:
    """`dict` without the class object, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Mapping[str, object], **kwargs: object) -> dict[str, object]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: list[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """`namespace` without underscored names, which lead out of the sandbox."""

    def __init__(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        both = {**(values or {}), **named}
        for name in both:
            _refuse_underscored(name)
        super().__init__(both)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscored(name)
        super().__setitem__(name, value)


def _refuse_underscored(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"chat templates may not store the name {name!r}")
