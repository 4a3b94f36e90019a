"""Answers held to a grammar: what can be asked for, that nothing else comes out, and that neighbours do not notice."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from supervisor.protocol import Code, Sampling
from tests.stands.equality import assert_same_greedy, greedy_ids
from tests.stands.models import tiny_model
from tests.stands.sink import GREEDY, Answer, RunningEngine
from worker.job import Job, Matcher
from worker.prompt import Refused
from worker.structured import compiled
from worker.text import Text
from worker.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "sunny": {"type": "boolean"},
        "guests": {"type": "array", "items": {"enum": ["ann", "bob"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "sunny", "guests"],
    "additionalProperties": False,
}
FORMATS: dict[str, Mapping[str, object]] = {
    "schema": {"type": "json_schema", "schema": SCHEMA},
    "regex": {"type": "regex", "regex": "[a-f]{3}-[0-9]{2}"},
    "choice": {"type": "choice", "choice": ["yes", 'n"o\n', "/é/"]},
    "lark": {"type": "grammar", "grammar": 'start: "a" (" b" | " c") "."'},
    "gbnf": {"type": "grammar", "grammar": 'root ::= "a" (" b" | " c") "."'},
}


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


PROMPT = "You are a helpful assistant. What is the capital of France?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(model: Path) -> Text:
    return Text.open(model)


@pytest.fixture(scope="module")
def vocabulary(text: Text) -> Vocabulary:
    return Vocabulary(text.tokenizer, text.vocab_size, text.eos_ids)


def matches(name: str, answer: str) -> bool:
    match name:
        case "schema":
            value = json.loads(answer)
            ok = set(value) == {"city", "sunny", "guests"} and value["city"] in ("Paris", "Rome")
            return ok and value["sunny"] in (True, False) and 1 <= len(value["guests"]) <= 3
        case "regex":
            return re.fullmatch("[a-f]{3}-[0-9]{2}", answer) is not None
        case "choice":
            return answer in ("yes", 'n"o\n', "/é/")
        case _:
            return answer in ("a b.", "a c.")


def submit(
    e: RunningEngine,
    rid: str,
    prompt: list[int],
    matcher: Matcher | None,
    max_tokens: int = 900,
    sampling: Sampling = GREEDY,
    stops: tuple[str, ...] = (),
) -> Answer:
    e.engine.submit(Job(rid, tuple(prompt), sampling, max_tokens, stops, submitted_at=time.monotonic(), matcher=matcher))
    return e.sink.of(rid)


def ask(e: RunningEngine, rid: str, prompt: list[int], matcher: Matcher | None, **more: object) -> Answer:
    answer = submit(e, rid, prompt, matcher, **more)  # type: ignore[arg-type]
    assert answer.over.wait(60)
    return answer


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, seed=4)])
def test_an_answer_matches_what_was_asked_for_and_then_ends(
    model: Path, text: Text, vocabulary: Vocabulary, name: str, sampling: Sampling
) -> None:
    with RunningEngine(model) as e:
        answer = ask(e, "a", text.encode_text(PROMPT), compiled(vocabulary, FORMATS[name]), sampling=sampling)
    assert answer.finish == "stop"
    assert matches(name, answer.text), answer.text


def test_a_json_object_is_one_as_far_as_it_gets(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    """Random weights do not end it: what there is at the limit is a part of an object, and is called cut off."""
    with RunningEngine(model) as e:
        answer = ask(e, "a", text.encode_text(PROMPT), compiled(vocabulary, {"type": "json_object"}), max_tokens=40)
    assert answer.finish == "length" and answer.text.lstrip().startswith("{")
    assert answer.usage is not None and answer.usage.completion_tokens == 40


def test_whitespace_between_the_parts_of_a_json_text_is_bounded(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    spaces = {token: 100.0 for token in range(text.vocab_size) if not text.decode([token]).strip(" \n\t")}
    with RunningEngine(model) as e:
        matcher = compiled(vocabulary, FORMATS["schema"])
        answer = ask(
            e, "a", text.encode_text(PROMPT), matcher, sampling=Sampling(temperature=0.0, logit_bias=spaces), max_tokens=1500
        )
    assert answer.finish == "stop" and matches("schema", answer.text)
    assert "\n" * 20 in answer.text


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"type": "xml"}, "xml"),
        ({"type": ["regex"]}, "regex"),
        ({"type": "json_schema"}, "schema"),
        ({"type": "json_schema", "schema": {"type": "nope"}}, "nope"),
        ({"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"type": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/schema"}}, "http://127.0.0.1:9/schema"),
        ({"type": "json_schema", "schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"type": "json_schema", "schema": 7}, "schema"),
        ({"type": "regex", "regex": "[a-"}, "unclosed"),
        ({"type": "regex", "regex": "(?=x)y"}, "look"),
        ({"type": "choice", "choice": []}, "choice"),
        ({"type": "json_schema", "schema": {"$ref": "#"}}, "nothing can match"),
        ({"type": "json_schema", "schema": _nested(200)}, "recursion"),
        ({"type": "grammar", "grammar": "start: missing"}, "missing"),
        ({"type": "grammar", "grammar": "start: start"}, "nothing can match"),
        ({"type": "grammar", "grammar": ""}, "grammar"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    vocabulary: Vocabulary, wanted: Mapping[str, object], words: str
) -> None:
    with pytest.raises(Refused) as refused:
        compiled(vocabulary, wanted)
    assert refused.value.code == Code.BAD_SCHEMA
    assert words in refused.value.message


def test_a_grammar_that_takes_too_long_is_refused(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.structured.FIRST_MASK_LIMIT_S", -1.0)
    with pytest.raises(Refused, match="too complex"):
        compiled(vocabulary, FORMATS["regex"])


def test_any_text_needs_no_grammar(vocabulary: Vocabulary) -> None:
    assert compiled(vocabulary, None) is None
    assert compiled(vocabulary, {"type": "text"}) is None


def test_constrained_plain_and_constrained_again_each_answer_as_alone(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    prompt = text.encode_text(PROMPT)
    with RunningEngine(model) as e:
        first = ask(e, "first", prompt, compiled(vocabulary, FORMATS["schema"]))
        plain = ask(e, "plain", prompt, None, max_tokens=30)
        again = ask(e, "again", prompt, compiled(vocabulary, FORMATS["schema"]))
        other = ask(e, "other", prompt, compiled(vocabulary, FORMATS["regex"]))
    assert matches("schema", first.text) and again.text == first.text and matches("regex", other.text)
    ids = greedy_ids(model, prompt, 30)
    assert_same_greedy(model, prompt, text.decode(ids), plain.text)


def test_four_at_once_some_held_and_some_free_answer_as_each_alone(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    wanted = {"schema": FORMATS["schema"], "free": None, "regex": FORMATS["regex"], "long": None}
    prompts = {name: text.encode_text(f"{PROMPT} {name} " * (1 + i)) for i, name in enumerate(wanted)}
    sampled = Sampling(temperature=0.9, seed=21)
    with RunningEngine(model) as e:
        alone = {
            name: ask(e, f"alone-{name}", prompts[name], compiled(vocabulary, fmt), max_tokens=400, sampling=sampled)
            for name, fmt in wanted.items()
            if fmt is not None
        }
        for round_number in range(3):
            matchers = {name: compiled(vocabulary, fmt) for name, fmt in wanted.items()}
            with e.at_once():
                together = {
                    name: submit(
                        e,
                        f"{round_number}-{name}",
                        prompts[name],
                        matcher,
                        max_tokens=60 if matcher is None else 400,
                        sampling=GREEDY if matcher is None else sampled,
                    )
                    for name, matcher in matchers.items()
                }
            assert all(answer.over.wait(60) for answer in together.values())
            for name, answer in together.items():
                if wanted[name] is None:
                    ids = greedy_ids(model, prompts[name], 60)
                    assert_same_greedy(model, prompts[name], text.decode(ids), answer.text)
                else:
                    assert answer.text == alone[name].text and matches(name, answer.text)
    assert any(len(step) > 2 for step in e.sink.steps), "nothing was batched"


def test_a_choice_among_thousands_is_followed_to_its_end(text: Text, vocabulary: Vocabulary) -> None:
    options = [f"option {i:04}" for i in range(5000)]
    matcher = compiled(vocabulary, {"type": "choice", "choice": options})
    assert matcher is not None
    answer = matcher.deep_copy()
    for token in text.encode_text(options[4711]):
        assert answer.compute_logit_bias()[token], "the next part of an option may come next"
        assert answer.consume_token(token), answer.get_error()
    assert answer.is_stopped()


def test_each_choice_has_a_grammar_of_its_own(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    with RunningEngine(model) as e:
        submit(
            e,
            "a",
            text.encode_text(PROMPT),
            compiled(vocabulary, FORMATS["regex"]),
            sampling=Sampling(temperature=1.5, seed=9, n=3),
        )
        answers = [e.sink.of("a", choice) for choice in range(3)]
        assert all(answer.over.wait(60) for answer in answers)
    assert all(matches("regex", answer.text) for answer in answers)
    assert len({answer.text for answer in answers}) > 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, min_tokens=50), Sampling(temperature=0.0, ignore_eos=True)])
def test_a_grammar_that_is_fulfilled_allows_no_more_text(
    model: Path, text: Text, vocabulary: Vocabulary, sampling: Sampling
) -> None:
    with RunningEngine(model) as e:
        answer = ask(e, "a", text.encode_text(PROMPT), compiled(vocabulary, FORMATS["regex"]), sampling=sampling, max_tokens=60)
    assert matches("regex", answer.text)
    assert answer.finish == ("length" if sampling.ignore_eos else "stop")


def test_a_stop_string_ends_a_held_answer_too(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    with RunningEngine(model) as e:
        answer = ask(e, "a", text.encode_text(PROMPT), compiled(vocabulary, FORMATS["schema"]), stops=('"sunny"',))
    assert answer.finish == "stop" and answer.stop_string == '"sunny"'
    assert "city" in answer.text and "sunny" not in answer.text


class Breaking:
    """A matcher that fails after some tokens, as one does that has grown too complex."""

    def __init__(self, matcher: Matcher, tokens: int) -> None:
        self._matcher = matcher
        self._left = tokens

    def deep_copy(self) -> "Breaking":
        return Breaking(self._matcher.deep_copy(), self._left)

    def consume_token(self, sampled_token: int) -> bool:
        self._left -= 1
        return self._left >= 0 and self._matcher.consume_token(sampled_token)

    def is_stopped(self) -> bool:
        return self._left < 0 or self._matcher.is_stopped()

    def is_error(self) -> bool:
        return self._left < 0

    def get_error(self) -> str:
        return "too complex"

    def compute_logit_bias(self) -> bytes:
        return self._matcher.compute_logit_bias()


def test_a_grammar_that_breaks_down_ends_its_own_answer_with_an_error(model: Path, text: Text, vocabulary: Vocabulary) -> None:
    prompt = text.encode_text(PROMPT)
    matcher = compiled(vocabulary, FORMATS["schema"])
    assert matcher is not None
    with RunningEngine(model) as e:
        plain = submit(e, "plain", prompt, None, max_tokens=60)
        broken = ask(e, "broken", prompt, Breaking(matcher, 5))
        assert plain.over.wait(60)
    assert broken.finish == "error" and len(broken.rows) <= 6
    assert_same_greedy(model, prompt, text.decode(greedy_ids(model, prompt, 60)), plain.text)


def test_an_answer_that_was_put_aside_is_held_to_where_it_was(text: Text, vocabulary: Vocabulary) -> None:
    import mlx.core as mx

    from worker.constraint import Constraint

    matcher = compiled(vocabulary, FORMATS["schema"])
    assert matcher is not None
    prompt, said = text.encode_text(PROMPT), text.encode_text('{"city": "Rome", "sunny": tr')
    logits = mx.zeros((1, text.vocab_size))
    step_by_step = Constraint(matcher, len(prompt), text.eos_ids)
    for known in range(len(said) + 1):
        expected = step_by_step(mx.array([*prompt, *said[:known]]), logits)
    at_once = Constraint(matcher, len(prompt), text.eos_ids)(mx.array([*prompt, *said]), logits)
    assert at_once.tolist() == expected.tolist()
    assert 0 < sum(value == 0 for value in at_once.tolist()[0]) < 10  # type: ignore[index]


def test_where_a_grammar_leaves_only_the_end_min_tokens_cannot_bar_it(text: Text, vocabulary: Vocabulary) -> None:
    import mlx.core as mx

    from worker.controls import Controls

    prompt, said = text.encode_text(PROMPT), text.encode_text("yes")
    job = Job("a", tuple(prompt), Sampling(min_tokens=50), 60, matcher=compiled(vocabulary, FORMATS["choice"]))
    logits = mx.zeros((1, text.vocab_size))
    for process in Controls(job, 0, text.vocab_size, text.eos_ids).processors:
        logits = process(mx.array([*prompt, *said]), logits)
    assert {token for token, value in enumerate(logits.tolist()[0]) if value == 0} == text.eos_ids  # type: ignore[index]
