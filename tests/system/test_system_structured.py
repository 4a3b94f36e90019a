"""The real model held to formats, over HTTP and with the unmodified SDK: the answers parse, and neighbours do not notice."""

import json
import re
import threading
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.stands.equality import assert_same_greedy
from tests.stands.server import Answer, Server
from worker.text import Text

pytestmark = pytest.mark.real

ASK = "Paris is the capital of France and has two million people. Say so as JSON."


class Place(BaseModel):
    city: str
    country: Literal["France", "Italy"]
    millions: int
    tags: list[Literal["big", "old"]]


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def test_the_sdk_parses_an_answer_into_its_model(real: Server) -> None:
    parsed = client(real).chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": ASK}],
        response_format=Place,
        temperature=0,
        max_tokens=200,
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Place)
    assert choice.message.parsed.city == "Paris"


def test_a_stream_of_a_schema_parses_too(real: Server) -> None:
    with client(real).chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": ASK}],
        response_format=Place,
        temperature=0,
        max_tokens=200,
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)


def test_a_json_object_is_one(real: Server) -> None:
    answer = real.chat("smollm2", ASK, response_format={"type": "json_object"}, max_tokens=80)
    assert answer.status == 200
    body = answer.json()
    if body["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert body["choices"][0]["finish_reason"] == "length" and answer.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, "[0-9]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, "Paris"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "it is " ("Paris" | "Rome")'}}, "it is (Paris|Rome)"),
    ],
)
def test_an_answer_has_the_form_asked_for(real: Server, fields: dict[str, Any], pattern: str) -> None:
    answer = real.chat("smollm2", "What is the capital of France?", max_tokens=40, **fields)
    assert answer.status == 200, answer
    assert re.fullmatch(pattern, answer.text), answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_schema_that_cannot_be_enforced_is_a_400_before_anything_runs(real: Server) -> None:
    schema = {"type": "array", "uniqueItems": True}
    answer = real.chat("smollm2", ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert answer.status == 400
    assert answer.error["code"] == "bad_schema" and "uniqueItems" in str(answer.error["message"])


def test_constrained_plain_constrained_and_all_at_once_answer_as_alone(real: Server, smollm2) -> None:
    plain = {"max_tokens": 24}
    held = {
        "max_tokens": 120,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": Place.model_json_schema()}},
    }
    asked: dict[str, dict[str, Any]] = {
        ASK: held,
        "Count from one to ten.": plain,
        "Rome is in Italy and is big and old. Say so as JSON.": held,
        "What is water made of?": plain,
    }
    alone = {prompt: real.chat("smollm2", prompt, **fields).text for prompt, fields in asked.items()}
    together: dict[str, Answer] = {}

    def one(prompt: str) -> None:
        together[prompt] = real.chat("smollm2", prompt, cache_salt="apart", **asked[prompt])

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = Text.open(smollm2)
    for prompt, fields in asked.items():
        if fields is plain:
            ids = text.encode_chat([{"role": "user", "content": prompt}])
            assert_same_greedy(smollm2, ids, alone[prompt], together[prompt].text)
        else:
            Place.model_validate_json(together[prompt].text)
            assert together[prompt].text == alone[prompt]
