"""Volatile headers as a worker's assignment names them, and named anew while the text worker runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.protocol import Accepted, Assign, Prompt, Result
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.scripted_peers import ScriptedGateway, assign_model, serving
from worker.text import Text

HEADER, RULES = "x-turn: 17", "Be brief and answer with one word."
MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": f"{HEADER}\n{RULES}"},
    {"role": "user", "content": "How are you today?"},
]
BARE: list[dict[str, object]] = [{"role": "system", "content": RULES}, MESSAGES[1]]
SETTINGS: dict[str, object] = {"volatile_headers": ["x-turn:"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def text_worker(settings: dict[str, object]) -> Callable[[str], Assign]:
    return lambda endpoint: Assign(kind="text", gen=1, data_endpoints=[endpoint], settings=settings)


async def counted(gateway: ScriptedGateway, model: Path) -> object:
    from supervisor.protocol import ModelRef

    ref = ModelRef(id="tiny", path=str(model), context=0)
    rid = gateway.submit(Prompt(messages=MESSAGES), task="count", model=ref)
    return (await gateway.expect(Result, lambda result: result.rid == rid)).data["prompt_tokens"]


async def test_the_text_worker_counts_without_them_and_hears_of_a_change_at_once(model: Path) -> None:
    text = Text.open(model)
    without, with_header = len(text.encode_chat(BARE)), len(text.encode_chat(MESSAGES))
    async with serving(text_worker(SETTINGS), "t.1") as (supervisor, gateway):
        assert await counted(gateway, model) == without
        supervisor.send(text_worker({"volatile_headers": []})(f"ipc://{supervisor.data_socket}"))
        async with asyncio.timeout(patient_s(10)):  # another socket: nothing says which message comes first
            while await counted(gateway, model) != with_header:
                await asyncio.sleep(0.01)


async def test_a_models_worker_answers_the_prompt_that_the_text_worker_counts(model: Path) -> None:
    async with serving(assign_model(model, settings=SETTINGS)) as (_, gateway):
        rid = gateway.submit(Prompt(messages=MESSAGES), task="chat", max_tokens=1)
        accepted = await gateway.expect(Accepted, lambda accepted: accepted.rid == rid)
        assert accepted.prompt_tokens == len(Text.open(model).encode_chat(BARE))
