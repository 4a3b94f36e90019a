"""The text worker as a real process, between a scripted supervisor and a scripted gateway."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from supervisor.build import build
from supervisor.protocol import (
    VERSION,
    Assign,
    Beat,
    Bye,
    Fault,
    GatewayLost,
    Hello,
    Join,
    ModelRef,
    Problem,
    Prompt,
    Ready,
    Result,
    Stop,
    Welcome,
)
from tests.stands.models import tiny_model
from tests.stands.patience import patient_s
from tests.stands.scripted_peers import ScriptedGateway, assign_text_worker, serving, supervised

TEXT_WORKER = "t.1"
HELLO_PROMPT = Prompt(messages=[{"role": "user", "content": "How are you today?"}])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def ref(path: Path, context: int = 0) -> ModelRef:
    return ModelRef(id="tiny", path=str(path), context=context)


async def test_it_says_hello_joins_and_is_ready_only_after_the_welcome() -> None:
    async with supervised(assign_text_worker, TEXT_WORKER) as supervisor:
        hello = await supervisor.expect(Hello)
        assert (hello.v, hello.build, hello.nonce, hello.rank) == (VERSION, build(), supervisor.nonce, 0)
        assert supervisor.process is not None and hello.pid == supervisor.process.pid
        gateway = ScriptedGateway(supervisor.data_socket, supervisor.story)
        gateway.welcoming = False
        join = await gateway.expect(Join)
        assert (join.worker, join.model, join.nonce) == (TEXT_WORKER, "", supervisor.nonce)
        await gateway.expect(Join)  # asked again, for want of an answer
        assert not any(isinstance(message, Ready) for message in supervisor.story)
        gateway.send(Welcome(epoch="epoch-1"))
        await supervisor.expect(Ready)
        gateway.close()


async def test_it_counts_the_tokens_of_a_model_that_is_not_loaded(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, gateway):
        rid = gateway.submit(HELLO_PROMPT, task="count", model=ref(model))
        counted = await gateway.expect(Result, lambda m: m.rid == rid)
        expected = len(_reference(model).apply_chat_template(HELLO_PROMPT.messages, add_generation_prompt=True)["input_ids"])
        assert counted.data == {"prompt_tokens": expected, "context": 2048}
        assert counted.epoch == "epoch-1"
        assert supervisor.process is not None
        mapped = {Path(m.path).name for m in psutil.Process(supervisor.process.pid).memory_maps()}
        assert not any("mlx" in name for name in mapped)


def _reference(model: Path):  # the library that our templates must agree with
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (_, gateway):
        rid = gateway.submit(Prompt(ids=[[5] * 40]), task="count", model=ref(model, context=40))
        problem = await gateway.expect(Problem, lambda m: m.rid == rid)
        assert problem.code == "context_length_exceeded"
        assert problem.message == (
            "This model's maximum context length is 40 tokens. However, your messages resulted in 40 tokens. "
            "Please reduce the length of the messages."
        )
        rid = gateway.submit(Prompt(ids=[[5] * 39]), task="count", model=ref(model, context=40))
        assert (await gateway.expect(Result, lambda m: m.rid == rid)).data == {"prompt_tokens": 39, "context": 40}


async def test_every_bad_request_gets_its_own_error_and_the_next_is_served(model: Path, tmp_path: Path) -> None:
    broken = tiny_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    bare = tiny_model(tmp_path / "bare")
    _without_template(bare)
    async with serving(assign_text_worker, TEXT_WORKER) as (_, gateway):
        cases = [
            (HELLO_PROMPT, broken, "count", "model_unloadable", "tokenizer.json"),
            (HELLO_PROMPT, tmp_path / "absent", "count", "model_unloadable", "config.json"),
            (HELLO_PROMPT, bare, "count", "template_error", "/v1/completions"),
            (Prompt(ids=[[99_999]]), model, "count", "bad_request", "99999"),
            (Prompt(ids=[[]]), model, "count", "bad_request", "empty"),
            (HELLO_PROMPT, model, "chat", "unsupported", "only counts"),
        ]
        for prompt, path, task, code, words in cases:
            rid = gateway.submit(prompt, task=task, model=ref(path))
            problem = await gateway.expect(Problem, lambda m, rid=rid: m.rid == rid)
            assert problem.code == code
            assert words in problem.message
        rid = gateway.submit("Hello", task="count", model=ref(model))
        assert (await gateway.expect(Result)).rid == rid


def _without_template(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))


async def test_a_changed_template_is_noticed(model: Path, tmp_path: Path) -> None:
    changing = tiny_model(tmp_path / "changing")
    async with serving(assign_text_worker, TEXT_WORKER) as (_, gateway):
        gateway.submit(HELLO_PROMPT, task="count", model=ref(changing))
        before = (await gateway.expect(Result)).data["prompt_tokens"]
        (changing / "chat_template.jinja").write_text("{{ messages[0].content }}")
        gateway.submit(HELLO_PROMPT, task="count", model=ref(changing))
        after = (await gateway.expect(Result)).data["prompt_tokens"]
        assert isinstance(before, int) and isinstance(after, int) and after < before


async def test_messages_of_another_epoch_are_dropped(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (_, gateway):
        gateway.epoch = "epoch-0"
        stale = gateway.submit("Hello", task="count", model=ref(model))
        gateway.epoch = "epoch-1"
        fresh = gateway.submit("Hello", task="count", model=ref(model))
        assert (await gateway.expect(Result)).rid == fresh
        assert stale not in {getattr(message, "rid", None) for message in gateway.story}


async def test_after_the_gateway_is_lost_it_joins_the_next_one(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, first):
        first.close()
        supervisor.send(GatewayLost(gateway="g.1"))
        second = ScriptedGateway(supervisor.data_socket, supervisor.story, epoch="epoch-2")
        try:
            await second.expect(Join)
            second.submit("Hello", task="count", model=ref(model))
            assert (await second.expect(Result)).epoch == "epoch-2"
        finally:
            second.close()
        assert sum(isinstance(message, Ready) for message in supervisor.story) == 1


async def test_what_it_does_not_understand_it_says_so_and_goes_on(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, gateway):
        supervisor.send_raw(b"dance", b"\x80")
        assert (await supervisor.expect(Problem)).code == "unknown_kind"
        gateway.send_raw(b"dance", b"\x80")
        assert (await gateway.expect(Problem)).code == "unknown_kind"
        gateway.send_raw(b"submit", b"not msgpack")
        gateway.send_raw(b"submit")
        gateway.submit("Hello", task="count", model=ref(model))
        await gateway.expect(Result)


async def test_it_beats_once_a_second() -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, _):
        supervisor.unread.clear()  # the next one is told as it comes
        first = await supervisor.expect(Beat)
        began = time.monotonic()
        third = await supervisor.expect(Beat, lambda beat: beat.seq == first.seq + 2)
        assert third.seq == first.seq + 2
        assert 0.5 < time.monotonic() - began < patient_s(4.0)


async def test_it_leaves_with_bye_when_told_to_stop() -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, _):
        supervisor.send(Stop(reason="test", flush_deadline_s=1.0))
        await supervisor.expect(Bye)
        assert await supervisor.exit_code() == 0


async def test_sigterm_is_a_stop_and_sigint_is_nothing() -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, _):
        supervisor.signal(signal.SIGINT)
        await supervisor.expect(Beat)
        supervisor.signal(signal.SIGTERM)
        await supervisor.expect(Bye)
        assert await supervisor.exit_code() == 0


async def test_it_exits_when_the_supervisor_is_gone() -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, _):
        began = time.monotonic()
        supervisor.cut_lifeline()
        assert await supervisor.exit_code(within_s=5.0) == 0
        assert time.monotonic() - began < patient_s(2.0)


async def test_a_kind_that_this_build_lacks_is_a_fatal_fault() -> None:
    async with supervised(lambda endpoint: Assign(kind="hologram", gen=1, data_endpoints=[endpoint])) as supervisor:
        fault = await supervisor.expect(Fault)
        assert fault.fatal and "hologram" in fault.message
        assert await supervisor.exit_code() == 65


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is a Linux figure")
async def test_it_stays_small(model: Path) -> None:
    async with serving(assign_text_worker, TEXT_WORKER) as (supervisor, gateway):
        gateway.submit(HELLO_PROMPT, task="count", model=ref(model))
        await gateway.expect(Result)
        assert supervisor.process is not None
        assert psutil.Process(supervisor.process.pid).memory_full_info().pss < 110e6
