"""A model's worker as a real process with a tiny real model, between a scripted supervisor and a scripted gateway.

One worker serves most of these tests; each leaves it idle.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from supervisor.protocol import (
    Accepted,
    Beat,
    CacheGrant,
    Cancel,
    Grant,
    Hello,
    Message,
    Problem,
    Prompt,
    Reasoning,
    Result,
    Row,
    Rows,
    Sampling,
    Trim,
    Usage,
    Welcome,
)
from tests.stands.models import tiny_model
from tests.stands.scripted_peers import ScriptedGateway, ScriptedSupervisor, assign_model, serving
from worker.text import Text
from worker.vocabulary import readable

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 2048
CHAT = Prompt(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you today?"}])
GREEDY = Sampling(temperature=0.0)
Peers = tuple[ScriptedSupervisor, ScriptedGateway]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(model: Path) -> AsyncIterator[Peers]:
    async with serving(assign_model(model, max_batch=4)) as peers:
        yield peers


@pytest.fixture
def gateway(peers: Peers) -> ScriptedGateway:
    peers[1].unread.clear()
    return peers[1]


async def idle(supervisor: ScriptedSupervisor) -> Beat:
    supervisor.unread.clear()
    return await supervisor.expect(Beat, lambda beat: beat.running == beat.waiting == 0)


async def test_a_chat_is_accepted_with_its_numbers_and_then_streamed(gateway: ScriptedGateway, model: Path) -> None:
    assert CHAT.messages is not None
    text = Text.open(model)
    prompt_ids = text.encode_chat(CHAT.messages)
    rid = gateway.submit(CHAT, task="chat", max_tokens=24, sampling=GREEDY)
    accepted = await gateway.expect(Accepted)
    assert (accepted.rid, accepted.prompt_tokens, accepted.max_tokens) == (rid, len(prompt_ids), 24)
    answer = await gateway.answer(rid)
    assert (answer.finish, answer.tokens, answer.problem) == ("length", 24, None)
    assert answer.usage == Usage(prompt_tokens=len(prompt_ids), completion_tokens=24)
    assert answer.text


async def test_messages_a_text_and_ids_of_the_same_prompt_get_the_same_answer(gateway: ScriptedGateway, model: Path) -> None:
    assert CHAT.messages is not None
    ids = Text.open(model).encode_chat(CHAT.messages)
    text = Text.open(model)._tokenizer.decode(ids, skip_special_tokens=False)  # pyright: ignore
    answers = []
    for prompt, task in ((CHAT, "chat"), (Prompt(text=text), "complete"), (Prompt(ids=[ids]), "complete")):
        rid = gateway.submit(prompt, task=task, max_tokens=16, sampling=GREEDY)
        answers.append((await gateway.answer(rid)).text)
    assert answers[0] and answers.count(answers[0]) == 3


async def test_a_stop_string_ends_the_answer_before_it(gateway: ScriptedGateway) -> None:
    rid = gateway.submit(CHAT, task="chat", max_tokens=40, sampling=GREEDY)
    whole = (await gateway.answer(rid)).text
    at = len(whole) // 2
    stop = whole[at : at + 3]
    rid = gateway.submit(CHAT, task="chat", max_tokens=40, sampling=GREEDY, stop=["never there", stop])
    answer = await gateway.answer(rid)
    assert (answer.finish, answer.stop_string) == ("stop", stop)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.tokens < 40


async def test_a_cancelled_answer_ends_with_one_row_that_says_so(peers: Peers, gateway: ScriptedGateway) -> None:
    rid = gateway.submit("The story", max_tokens=1900, sampling=GREEDY)
    await gateway.expect(Rows)
    gateway.cancel(rid)
    last = await gateway.expect(Rows, lambda rows: rows.rows[-1].finish is not None)
    assert (last.rows[-1].rid, last.rows[-1].finish) == (rid, "cancelled")
    assert last.rows[-1].usage is not None and 0 < last.rows[-1].usage.completion_tokens < 1900
    await idle(peers[0])
    assert not gateway.unread


async def test_a_request_cancelled_at_once_ends_the_same_way(peers: Peers, gateway: ScriptedGateway) -> None:
    rids = [gateway.submit(Prompt(text="word " * 1500), max_tokens=400) for _ in range(4)]
    for rid in rids:
        gateway.cancel(rid)
    finishes: dict[str, str] = {}
    while len(finishes) < len(rids):
        rows = await gateway.expect(Rows)
        finishes |= {row.rid: row.finish for row in rows.rows if row.finish}
    assert finishes == dict.fromkeys(rids, "cancelled")
    await idle(peers[0])


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(gateway: ScriptedGateway) -> None:
    rid = gateway.submit(Prompt(ids=[[5] * CONTEXT]))
    problem = await gateway.expect(Problem)
    assert (problem.rid, problem.code, problem.epoch) == (rid, "context_length_exceeded", "epoch-1")
    assert problem.message == (
        "This model's maximum context length is 2048 tokens. However, your messages resulted in 2048 tokens. "
        "Please reduce the length of the messages."
    )
    assert not any(isinstance(message, Accepted) and message.rid == rid for message in gateway.story)


@pytest.mark.parametrize("asked", [None, 5000])
async def test_an_answer_may_be_as_long_as_the_context_leaves_room_for(gateway: ScriptedGateway, asked: int | None) -> None:
    rid = gateway.submit(Prompt(ids=[[5] * (CONTEXT - 10)]), max_tokens=asked, sampling=GREEDY)
    answer = await gateway.answer(rid)
    assert answer.accepted is not None
    assert (answer.accepted.max_tokens, answer.finish, answer.tokens) == (10, "length", 10)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"prompt": CHAT, "task": "chat", "echo": True}, "unsupported", "echo"),
        ({"tool_choice": "required"}, "unsupported", "tool_choice"),
        ({"response_format": {"type": "xml"}}, "bad_schema", "xml"),
        ({"response_format": {"type": "json_schema", "schema": {"type": "nope"}}}, "bad_schema", "nope"),
        ({"response_format": {"type": "regex", "regex": "[a-"}}, "bad_schema", "unclosed"),
        ({"reasoning": Reasoning(budget=10)}, "unsupported", "budget"),
        ({"task": "embed"}, "unsupported", "embed"),
        ({"prompt": Prompt()}, "bad_request", "exactly one"),
        ({"prompt": Prompt(ids=[[1], [2]])}, "bad_request", "exactly one"),
        ({"prompt": Prompt(ids=[[-1]])}, "bad_request", "-1"),
        ({"prompt": Prompt(text="")}, "bad_request", "empty"),
        ({"prompt": Prompt(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])}, "template_error", "audio"),
        ({"prompt": CHAT, "template_kwargs": {"messages": []}}, "template_error", "messages"),
    ],
)
async def test_what_it_cannot_do_it_refuses_by_name(
    gateway: ScriptedGateway, fields: dict[str, object], code: str, words: str
) -> None:
    rid = gateway.submit(**{"prompt": Prompt(text="Hello"), "max_tokens": 2, **fields})  # pyright: ignore
    problem = (await gateway.answer(rid)).problem
    assert problem is not None
    assert problem.code == code
    assert words in problem.message


async def test_counting_gives_the_prompt_tokens_that_a_chat_would_have(gateway: ScriptedGateway) -> None:
    counting = gateway.submit(CHAT, task="count")
    counted = await gateway.expect(Result, lambda result: result.rid == counting)
    rid = gateway.submit(CHAT, task="chat", max_tokens=1)
    answer = await gateway.answer(rid)
    assert answer.accepted is not None
    assert counted.data == {"prompt_tokens": answer.accepted.prompt_tokens, "context": CONTEXT}


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(gateway: ScriptedGateway) -> None:
    gateway.submit("The story", rid="twice", max_tokens=300, sampling=GREEDY)
    await gateway.expect(Rows)
    gateway.submit("Another", rid="twice", max_tokens=5)
    problem = await gateway.expect(Problem)
    assert (problem.rid, problem.code) == ("twice", "bad_request")
    last = await gateway.expect(Rows, lambda rows: rows.rows[-1].finish is not None)
    assert (last.rows[-1].finish, last.rows[-1].tokens) == ("length", 300)


async def test_a_deadline_that_passes_ends_the_request_as_such(peers: Peers, gateway: ScriptedGateway) -> None:
    rid = gateway.submit("The story", max_tokens=1900, deadline_ms=300, sampling=GREEDY)
    problem = await gateway.expect(Problem, within_s=10)
    assert (problem.rid, problem.code) == (rid, "deadline")
    await idle(peers[0])
    rid = gateway.submit("The story", max_tokens=3, deadline_ms=20_000, sampling=GREEDY)
    assert (await gateway.answer(rid)).finish == "length"


async def test_requests_beside_each_other_share_a_message_and_all_end(gateway: ScriptedGateway) -> None:
    rids = {gateway.submit(f"Story {i}", max_tokens=400, sampling=GREEDY) for i in range(4)}
    ended: dict[str, str] = {}
    together = 0
    while set(ended) != rids:
        rows = await gateway.expect(Rows)
        together = max(together, len(rows.rows))
        ended |= {row.rid: row.finish for row in rows.rows if row.finish}
    assert set(ended.values()) == {"length"}
    assert together == 4


async def test_the_heartbeat_counts_the_work_and_whom_it_was_for(peers: Peers, gateway: ScriptedGateway) -> None:
    supervisor = peers[0]
    before = await idle(supervisor)
    rid = gateway.submit("The story", max_tokens=20, lease="lease-7", sampling=GREEDY)
    await gateway.answer(rid)
    after = await supervisor.expect(Beat, lambda beat: beat.progress > before.progress and beat.running == beat.waiting == 0)
    assert after.progress - before.progress >= 20
    assert after.lease_tokens.get("lease-7", 0) >= 20 or "lease-7" not in after.lease_tokens  # forgotten with the lease


async def test_grants_and_trims_are_taken_while_it_serves(gateway: ScriptedGateway, peers: Peers) -> None:
    rid = gateway.submit("The story", max_tokens=100, sampling=GREEDY)
    peers[0].send(Grant(blas_threads=1, hot_bytes=0))
    peers[0].send(Trim(level="hard"))
    assert (await gateway.answer(rid)).finish == "length"


async def test_a_grant_that_comes_while_the_tokenizer_opens_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    react = ScriptedSupervisor.react

    def react_and_shrink(supervisor: ScriptedSupervisor, message: Message) -> None:
        react(supervisor, message)
        if isinstance(message, Hello):
            supervisor.send(Grant(hot_bytes=0))

    monkeypatch.setattr(ScriptedSupervisor, "react", react_and_shrink)
    with_cache = assign_model(model, max_batch=1, cache=CacheGrant(hot_bytes=64 << 20, block=16))
    async with serving(with_cache) as (supervisor, gateway):
        for _ in range(2):
            answer = await gateway.answer(gateway.submit("A story " * 60, max_tokens=4, sampling=GREEDY))
            assert answer.usage is not None and answer.usage.cached_hot == 0
        assert (await idle(supervisor)).hot_bytes == 0


async def test_a_stale_cancel_does_not_touch_a_request(gateway: ScriptedGateway) -> None:
    rid = gateway.submit("The story", max_tokens=100, sampling=GREEDY)
    gateway.send(Cancel(epoch="epoch-0", rid=rid))
    assert (await gateway.answer(rid)).finish == "length"


async def test_a_long_prompt_does_not_hold_up_the_others_on_the_socket(gateway: ScriptedGateway) -> None:
    """Tokenizing happens in a pool and lets go of the interpreter."""
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.5:  # others may have the cores for a moment
        long = gateway.submit(Prompt(text="the quick brown fox " * 50_000))  # as much as is tokenized whole
        began = time.monotonic()
        short = gateway.submit("Hello", task="count")
        await gateway.expect(Result, lambda result, short=short: result.rid == short)
        counted_s = time.monotonic() - began
        problem = await gateway.expect(Problem, lambda problem, long=long: problem.rid == long)
        assert problem.code == "context_length_exceeded"
        shares.append(counted_s / (time.monotonic() - began))
    assert min(shares) < 0.5


async def test_a_new_epoch_ends_what_the_old_one_asked_for(peers: Peers, gateway: ScriptedGateway) -> None:
    """Last of the shared worker's tests: the epoch stays."""
    supervisor = peers[0]
    old = gateway.submit("The story", max_tokens=1900, sampling=GREEDY)
    await gateway.expect(Rows)
    gateway.epoch = "epoch-2"
    gateway.send(Welcome(epoch="epoch-2"))
    rid = gateway.submit("Hello", max_tokens=3, sampling=GREEDY)
    last = await gateway.expect(Rows, lambda rows: any(row.rid == rid and row.finish for row in rows.rows))
    assert last.epoch == "epoch-2"
    assert not any(row.rid == old for row in last.rows)
    await idle(supervisor)
    await asyncio.sleep(0.1)
    assert not gateway.unread  # not a word more about the old one


async def test_choices_end_one_by_one_and_the_request_with_the_last(gateway: ScriptedGateway) -> None:
    rid = gateway.submit(Prompt(text="Hello"), max_tokens=6, sampling=Sampling(temperature=1.0, seed=1, n=3), logprobs=1)
    rows = [row for row in await rows_until_over(gateway, rid, 3) if row.rid == rid]
    assert {row.choice for row in rows if row.finish == "length"} == {0, 1, 2}
    entry = (rows[0].logprobs or [])[0]
    assert isinstance(entry["bytes"], bytes) and readable(entry["bytes"]) == entry["token"]
    assert len(entry["top"]) == 1  # pyright: ignore[reportArgumentType]
    assert gateway.submit(CHAT, rid=rid, max_tokens=1) == rid, "the id is free again"
    assert (await gateway.answer(rid)).problem is None


async def test_a_format_that_outgrows_its_limits_ends_as_the_senders_error(gateway: ScriptedGateway) -> None:
    properties = {f"p{number}": {"type": "string", "maxLength": 5000} for number in range(2000)}
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": properties}}
    rid = gateway.submit(Prompt(text="Hello"), sampling=Sampling(temperature=0.0, n=2), response_format=wanted)
    problem = (await gateway.answer(rid)).problem
    assert problem is not None
    assert (problem.code, problem.retryable) == ("bad_schema", False) and "complex" in problem.message
    assert (await gateway.answer(gateway.submit(Prompt(text="Hello"), max_tokens=2, sampling=GREEDY))).finish == "length"


async def test_a_cancel_ends_every_choice(gateway: ScriptedGateway) -> None:
    rid = gateway.submit(Prompt(text="Hello"), sampling=Sampling(temperature=0.0, n=6))
    await gateway.expect(Rows, lambda rows: any(row.rid == rid for row in rows.rows))
    gateway.send(Cancel(epoch=gateway.epoch, rid=rid))
    rows = await rows_until_over(gateway, rid, 6)
    assert {row.choice for row in rows if row.finish == "cancelled"} == set(range(6))


async def rows_until_over(gateway: ScriptedGateway, rid: str, choices: int) -> list[Row]:
    rows: list[Row] = []
    while sum(row.finish is not None for row in rows) < choices:
        message = await gateway.expect(Rows, lambda message: any(row.rid == rid for row in message.rows))
        rows += [row for row in message.rows if row.rid == rid]
    return rows
