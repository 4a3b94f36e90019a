"""Jinja as chat templates expect it, and nothing more: transformers' extensions, filters and globals in the immutable sandbox.

Knows nothing of conversations; what a template may do is decided here and only here.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from worker import template_filters, template_limits


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateError where the source is not a template."""
    return _environment().from_string(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        finalize=_printable,
    )
    environment.filters |= template_filters.bounded(environment.filters) | {"tojson": _to_json}
    cast("dict[str, object]", environment.globals).pop("lipsum")  # text for page designers, as long as one likes
    cast("dict[str, object]", environment.globals).update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
    )
    return environment


class _BoundedConcat(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Bounded(ImmutableSandboxedEnvironment):
    """No expression makes a value beyond what `worker.template_limits` allows."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _BoundedConcat

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        template_limits.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        """The names are jinja's: a template's own arguments may be called anything else."""
        method = getattr(__obj, "__wrapped__", __obj)  # `format` has been replaced already
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            template_limits.check_method(getattr(method, "__name__", ""), owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def joined(self, values: Sequence[object]) -> str:
        """What `~` makes."""
        template_limits.allow(sum(map(template_limits.printed_size, values)))
        return str_join(values)


def _printable(value: object) -> object:
    if isinstance(value, list | tuple | dict):
        template_limits.allow(template_limits.printed_size(cast("object", value)))
    return cast("object", value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its content is rendered as it stands."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # jinja declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    between = sum(map(len, separators or ()))
    between += indent if isinstance(indent, int) else len(indent or "")
    template_limits.allow(template_limits.printed_size(value) * (1 + between))
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
