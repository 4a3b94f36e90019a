"""The life of a model's worker: from hello to ready, a gateway that dies under it, and every way it ends."""

import json
import signal
import time
from pathlib import Path

import pytest

from supervisor.protocol import (
    VERSION,
    Accepted,
    Beat,
    Bye,
    Fault,
    GatewayLost,
    Hello,
    Join,
    LoadProgress,
    Prompt,
    Ready,
    Rows,
    Sampling,
    Stop,
    Welcome,
)
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.scripted_peers import ScriptedGateway, assign_model, serving, supervised

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefills about 500 tokens a second here."""
    path = tmp_path_factory.mktemp("models") / "slow"
    return tiny_model(path, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, max_position_embeddings=32_768)


async def test_hello_assign_join_load_welcome_ready_in_this_order(model: Path) -> None:
    async with supervised(assign_model(model, max_batch=3), "w.4.2.0") as supervisor:
        hello = await supervisor.expect(Hello)
        assert (hello.v, hello.nonce, hello.rank) == (VERSION, supervisor.nonce, 0)
        gateway = ScriptedGateway(supervisor.data_socket, supervisor.story)
        gateway.welcoming = False
        join = await gateway.expect(Join)
        assert (join.worker, join.model, join.nonce) == ("w.4.2.0", "tiny", supervisor.nonce)
        await supervisor.expect(LoadProgress, lambda message: message.stage == "warm")
        await supervisor.expect(Beat, lambda beat: beat.busy_s == 0)  # loaded, and nothing to do
        assert not any(isinstance(message, Ready) for message in supervisor.story)
        gateway.send(Welcome(epoch="epoch-1"))
        ready = await supervisor.expect(Ready)
        assert (ready.context, ready.max_inflight) == (2048, 3)
        assert ready.weights_bytes > 0 and ready.kv_bytes_per_token > 0
        stages = [message.stage for message in supervisor.story if isinstance(message, LoadProgress)]
        assert stages[0] == "tokenizer" and stages[-1] == "warm" and "weights" in stages
        gateway.close()


async def test_when_its_gateway_dies_its_requests_end_and_it_joins_the_next(model: Path) -> None:
    async with serving(assign_model(model)) as (supervisor, first):
        first.submit("The story", rid="old", max_tokens=1900, sampling=GREEDY)
        await first.expect(Rows)
        first.close()
        supervisor.send(GatewayLost(gateway="g.1"))
        second = ScriptedGateway(supervisor.data_socket, supervisor.story, epoch="epoch-2")
        try:
            await second.expect(Join, within_s=5)
            second.submit("Hello", rid="new", max_tokens=4, sampling=GREEDY)
            answer = await second.answer("new")
            assert answer.finish == "length"
            await supervisor.expect(Beat, lambda beat: beat.running == 0)
            fresh = [message for message in second.story if isinstance(message, Rows) and message.epoch == "epoch-2"]
            assert {row.rid for message in fresh for row in message.rows} == {"new"}
        finally:
            second.close()


async def test_a_welcome_of_the_dead_gateway_is_not_taken_for_the_next_ones(model: Path) -> None:
    async with serving(assign_model(model)) as (supervisor, gateway):
        gateway.welcoming = False
        supervisor.send(GatewayLost(gateway="g.1"))
        await gateway.expect(Join)
        gateway.send(Welcome(epoch="epoch-1"))
        await gateway.expect(Join)
        await gateway.expect(Join)


async def test_stop_ends_a_stream_with_an_error_says_bye_and_exits(model: Path) -> None:
    async with serving(assign_model(model)) as (supervisor, gateway):
        rid = gateway.submit("The story", max_tokens=1900, sampling=GREEDY)
        await gateway.expect(Rows)
        began = time.monotonic()
        supervisor.send(Stop(reason="unload", flush_deadline_s=5.0))
        problem = (await gateway.answer(rid)).problem
        assert problem is not None and problem.code == "shutting_down"
        await supervisor.expect(Bye)
        assert await supervisor.exit_code() == 0
        assert time.monotonic() - began < patient_s(4.0)


async def test_sigterm_is_served_while_the_engine_computes(slow_model: Path) -> None:
    async with serving(assign_model(slow_model)) as (supervisor, gateway):
        gateway.submit(Prompt(ids=[[7, 8, 9] * 6000]), max_tokens=10)
        await gateway.expect(Accepted)
        await supervisor.expect(Beat, lambda beat: beat.running + beat.waiting > 0)
        began = time.monotonic()
        supervisor.signal(signal.SIGTERM)
        await supervisor.expect(Bye)
        assert await supervisor.exit_code() == 0
        assert time.monotonic() - began < patient_s(3.5)  # 2 s for the flush, 1 s of grace


async def test_it_beats_while_the_engine_computes(slow_model: Path) -> None:
    async with serving(assign_model(slow_model)) as (supervisor, gateway):
        gateway.submit(Prompt(ids=[[7, 8, 9] * 6000]), max_tokens=10)
        first = await supervisor.expect(Beat, lambda beat: beat.running > 0)
        began = time.monotonic()
        await supervisor.expect(Beat, lambda beat: beat.seq == first.seq + 2)
        assert time.monotonic() - began < patient_s(4.0)
        await supervisor.expect(Beat, lambda beat: beat.progress > first.progress)  # a chunk may take longer than two beats


async def test_without_a_supervisor_it_is_gone_within_two_seconds(slow_model: Path) -> None:
    async with serving(assign_model(slow_model)) as (supervisor, gateway):
        gateway.submit(Prompt(ids=[[7, 8, 9] * 6000]), max_tokens=10)
        await gateway.expect(Accepted)
        began = time.monotonic()
        supervisor.cut_lifeline()
        assert await supervisor.exit_code() == 0
        assert time.monotonic() - began < patient_s(2.0)


async def test_a_stop_while_it_loads_does_not_wait_for_the_load(slow_model: Path) -> None:
    async with supervised(assign_model(slow_model)) as supervisor:
        await supervisor.expect(LoadProgress)
        began = time.monotonic()
        supervisor.send(Stop(reason="unload", flush_deadline_s=5.0))
        await supervisor.expect(Bye)
        assert await supervisor.exit_code() == 0
        assert time.monotonic() - began < patient_s(3.0)
        assert not any(isinstance(message, Ready) for message in supervisor.story)


def truncated(model: Path) -> None:
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def of_unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "quantum"}))


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncated, "safetensors"), (of_unknown_architecture, "quantum"), (without_tokenizer, "tokenizer")],
)
async def test_a_model_that_can_never_load_is_a_fatal_fault_and_exit_65(tmp_path: Path, damage: object, words: str) -> None:
    model = tiny_model(tmp_path / "damaged")
    assert callable(damage)
    damage(model)
    async with supervised(assign_model(model)) as supervisor:
        fault = await supervisor.expect(Fault)
        assert fault.fatal and fault.code == "model_unloadable"
        assert words in fault.message
        assert await supervisor.exit_code() == 65
        assert "Traceback" not in supervisor.stderr
