"""A template cannot make a value without bound in one expression; what templates really do is not touched."""

from __future__ import annotations

import jinja2
import pytest

from worker.template_limits import ValueTooLarge
from worker.template_sandbox import compile_template

DOUBLED = "{% set ns = namespace(s='0123456789abcdef') %}{% for i in range(40) %}{% set ns.s = HOW %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{% set x = [0] * 10**9 %}",
        "{% set x = 10 ** (10 ** 10) %}",
        "{% set ns = namespace(n=2 ** 60000) %}{% for i in range(20) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        DOUBLED.replace("HOW", "ns.s ~ ns.s"),
        DOUBLED.replace("HOW", "ns.s + ns.s"),
        DOUBLED.replace("HOW", "ns.s.replace('0', ns.s)"),
        DOUBLED.replace("HOW", "ns.s|replace('0', ns.s)"),
        DOUBLED.replace("HOW", "ns.s.join(ns.s|list)"),
        DOUBLED.replace("HOW", "ns.s|list|join(ns.s)"),
        DOUBLED.replace("HOW", "'{0}{0}'.format(ns.s)"),
        DOUBLED.replace("HOW", "'%s%s' % (ns.s, ns.s)"),
        DOUBLED.replace("HOW", "'%s%s'|format(ns.s, ns.s)"),
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.rjust(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ '\\t'.expandtabs(10**9) }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1.0 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ 'a'|indent(10**9, true) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ ([1] * 10)|tojson(separators=('a' * 10**7, 'b')) }}",
        "{{ ('a ' * 10**6)|wordwrap(2, wrapstring='a' * 10**6) }}",
        "{{ ['a' * 10**6] * 10**6 }}",
        "{{ (['a' * 10**6] * 10**6)|string }}",
        "{{ (['a' * 10**6] * 10**6)|join }}",
        "{{ ([{'a': 'a' * 10**6}] * 10**6)|join(attribute='a') }}",
        "{{ (['a' * 10**6] * 10**6)|tojson }}",
        "{{ (['a' * 10**6] * 10**6)|upper }}",
        "{{ '' ~ ['a' * 10**6] * 10**6 }}",
        "{{ '%s' % [['a' * 10**6] * 10**6] }}",
        "{{ range(10**9)|list }}",
        "{{ lipsum(n=10**9) }}",
    ],
)
def test_an_expression_that_would_take_all_memory_is_refused_before_it_does(source: str) -> None:
    with pytest.raises((ValueTooLarge, jinja2.exceptions.UndefinedError, OverflowError)):
        compile_template(source).render()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'ab' * 3 ~ 1 ~ [2] }}", "ababab1[2]"),
        ("{{ [1] * 2 + [3] }}{{ 2 ** 10 }}{{ 7 * 6 }}{{ 2.5 * 2 }}{{ -3 * 'a' }}", "[1, 1, 3]1024425.0"),
        ("{{ '%05d|%-4s|%.2f%%' % (7, 'x', 1.5) }}", "00007|x   |1.50%"),
        ("{{ '%(a)s' % {'a': 1} }}{{ 7 % 4 }}", "13"),
        ("{{ 'id 12345678901: %s'|format(98765432109) }}", "id 12345678901: 98765432109"),
        ("{{ '{:>4}|{a}'.format(1, a=20241231235959) }}{{ '{a}'.format_map({'a': 1}) }}", "   1|202412312359591"),
        ("{{ 'a'|center(3) }}|{{ 'a'.center(3) }}|{{ 'a\\nb'|indent(2) }}", " a | a |a\n  b"),
        ("{{ 'aXbX'|replace('X', '--') }}{{ 'aXbX'.replace('X', '', 1) }}", "a--b--abX"),
        ("{{ [1, 2]|join(', ') }}{{ [{'a': 1}]|join('-', attribute='a') }}{{ ','.join(['a', 'b']) }}", "1, 21a,b"),
        ("{{ [1, 2, 3]|batch(2, 0)|list }}{{ {'a': [1]}|tojson(indent=1) }}", '[[1, 2], [3, 0]]{\n "a": [\n  1\n ]\n}'),
        ("{{ 'aa bb cc'|wordwrap(2) }}{{ 'aa bb'|wordwrap(2, wrapstring='|') }}", "aa\nbb\ncc" + "aa|bb"),
        ("{{ [1, 2]|tojson(indent='--') }}{{ [1, 2]|tojson(separators=(',', ':')) }}", "[\n--1,\n--2\n][1,2]"),
        ("{{ ' A '|trim|lower|title }}{{ [1]|string|length }}{{ 'a b'|map('upper')|join }}", "A3A B"),
        ("{{ 'x' if 'a' in 'abc' and not false }}{{ none ~ true }}", "xNoneTrue"),
    ],
)
def test_what_templates_do_is_not_touched(source: str, expected: str) -> None:
    assert compile_template(source).render() == expected


def test_a_conversation_as_large_as_any_is_rendered() -> None:
    text = "word " * 3_000_000
    loop = "{% for m in messages %}{% set ns.s = ns.s ~ m.content|trim + '\\n' %}{% endfor %}"
    source = "{% set ns = namespace(s='') %}" + loop + "{{ ns.s }}"
    messages = [{"content": text}, {"content": "b"}]
    assert compile_template(source).render(messages=messages) == text.strip() + "\nb\n"
