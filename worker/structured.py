"""From what a request wants its answer to look like to the grammar that holds it to that, or the refusal its sender gets.

Runs in the pool, before a request reaches the engine: a schema that cannot be enforced costs nobody a prefill. Must not
import MLX.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from supervisor.protocol import Code
from worker.job import Matcher
from worker.prompt import Refused
from worker.vocabulary import TokensUnreadable, Vocabulary

WHITESPACE = r"[ \t\r\n]{0,32}"
"""Between the parts of a JSON text. Without a bound small models indent for ever; with none, good ones leave their habits."""
FIRST_MASK_LIMIT_S = 0.5
"""Of processor time: that the machine is busy is no fault of a grammar. An ordinary one takes 1 ms. Where the first takes this
long, later ones would hold up every stream."""
_Format = Mapping[str, object]


def compiled(vocabulary: Vocabulary, response_format: _Format | None) -> Matcher | None:
    """None where any text will do. Raises Refused."""
    if response_format is None or response_format.get("type") == "text":
        return None
    grammar = grammar_of(response_format)
    try:
        matching = vocabulary.matching
    except TokensUnreadable as e:
        raise Refused(Code.UNSUPPORTED, f"this model's tokenizer cannot be held to a grammar: {e}") from e
    matcher = LLMatcher(matching, grammar, log_level=0)
    began = time.thread_time()
    if not matcher.is_error():
        matcher.compute_logit_bias()  # the copies that the engine makes know it already
    if matcher.is_error():
        reason = matcher.get_error().partition("\n<state>")[0]
        raise _bad(response_format, "nothing can match it" if reason.startswith("NoExtension") else reason)
    if time.thread_time() - began > FIRST_MASK_LIMIT_S:
        raise _bad(response_format, "it is too complex")
    return matcher


def grammar_of(response_format: _Format) -> str:
    """In llguidance's own form. Raises Refused."""
    kind = response_format.get("type")
    make = _GRAMMARS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise Refused(Code.BAD_SCHEMA, f"there is no response format of type {kind!r}")
    try:
        return make(response_format)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise _bad(response_format, str(e)) from e


def _bad(response_format: _Format, reason: str) -> Refused:
    what = {"json_schema": "schema", "json_object": "schema"}.get(str(response_format["type"]), str(response_format["type"]))
    return Refused(Code.BAD_SCHEMA, f"The {what} cannot be enforced: {reason.strip()}")


def _json(schema: object) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})


def _choice(response_format: _Format) -> str:
    options = cast("list[str]", response_format["choice"])
    if not options:
        raise ValueError("there is nothing to choose from")
    # One terminal is one way to go on for the parser: with one for each option, more than 2000 failed within an answer.
    anyone = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {anyone}")


def _grammar(response_format: _Format) -> str:
    """Lark as llguidance has it, or GBNF."""
    text = str(response_format["grammar"])
    if not text.strip():
        raise ValueError("it is empty")
    return LLMatcher.grammar_from_lark(any_to_lark(text))


_GRAMMARS: dict[str, Callable[[_Format], str]] = {
    "json_object": lambda _: _json({"type": "object"}),
    "json_schema": lambda wanted: _json(wanted["schema"]),
    "regex": lambda wanted: LLMatcher.grammar_from_regex(str(wanted["regex"])),
    "choice": _choice,
    "grammar": _grammar,
}
