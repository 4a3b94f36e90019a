"""Sixteen clients at once with prompts of all lengths, greedy, seeded and held to a grammar, three times over: everybody gets
the answer it would get alone, whoever its neighbours are and however much of its prompt is cached.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.stands.clients import at_once
from tests.stands.equality import assert_same_greedy
from tests.stands.models import tiny_model
from tests.stands.server import Answer, Server, running

GREEDY_TOKENS = [5, 900, 33, 1800, 65, 300, 12, 257]
SEEDED: dict[str, object] = {"temperature": 0.9, "top_p": 0.95, "seed": 4321, "max_tokens": 16}
HELD: dict[str, object] = {"structured_outputs": {"regex": "[a-z]{3,6}( [a-z]{3,6}){2}"}, "temperature": 0, "max_tokens": 40}


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    fields: dict[str, object] = field(default_factory=lambda: {"temperature": 0, "max_tokens": 12})

    def of(self, server: Server) -> Answer:
        return server.post("/v1/completions", {"model": "tiny", "prompt": self.prompt, **self.fields}, timeout_s=120)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(10, 400), k=length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("parallel") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running({"tiny": model}) as server:
        yield server


def test_sixteen_at_once_are_answered_as_each_alone_in_three_rounds(server: Server, model: Path) -> None:
    greedy = [Asked(prompt(length)) for length in GREEDY_TOKENS]
    others = [Asked(prompt(40 * i + 7, 2), SEEDED if i % 2 else HELD) for i in range(8)]
    # Alone with a salt of their own: what they left in the cache is not what the others find.
    alone = {id(one): Asked(one.prompt, {**one.fields, "cache_salt": "alone"}).of(server).text for one in (*greedy, *others)}
    assert len(set(alone.values())) > 12, "each has something of its own to say"
    for round_ in range(3):
        everybody = [*greedy, *others]
        random.Random(round_).shuffle(everybody)
        answers = dict(zip(map(id, everybody), at_once([lambda one=one: one.of(server) for one in everybody]), strict=True))
        assert {answer.status for answer in answers.values()} == {200}
        for one in greedy:
            assert_same_greedy(model, one.prompt, alone[id(one)], answers[id(one)].text)
        assert {id(one): answers[id(one)].text for one in others} == {id(one): alone[id(one)] for one in others}
        assert any(answer.cached_tokens for answer in answers.values()) == (round_ > 0)
