"""What coding agents and chat frontends do besides growing one conversation: what can be reused then is reused.

How much that is, is counted from the prompts' tokens: everything that a prompt has in common with an earlier one, or with one
and the answer to it, up to a whole block, and never the last token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stands.clients import at_once
from tests.stands.families import family_model
from tests.stands.models import tiny_model
from tests.stands.raw_stream import Stream
from tests.stands.server import Server, running
from worker.text import Text

BLOCK = 64
RULES = "You are a coding agent. Answer the question with one word and say how to get from here to there. " * 12
TASK = "Please fix the main function that returns a list of the people of the world. "
TITLE = "Generate a short title for the conversation below and answer with nothing else. "
THINKS = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n{% endif %}{% endif %}"
)
"""As Qwen's: thoughts are shown until the user speaks again, and the answer begins with one."""
LEFT = "<total_tokens>{} tokens left</total_tokens>"

Message = dict[str, object]


class Agent:
    """Talks to one model and knows what that model has read and said so far."""

    def __init__(self, server: Server, model: str, text: Text) -> None:
        self.server, self.model, self.text = server, model, text
        self.known: list[list[int]] = []

    def reusable(self, messages: Sequence[Message], **shape: Any) -> int:
        ids = self.text.encode_chat(list(messages), **shape)
        longest = max((common(ids, other) for other in self.known), default=0)
        return min(longest, len(ids) - 1) // BLOCK * BLOCK

    def reusable_with(self, messages: Sequence[Message], answer: str) -> int:
        """What there will be to reuse of these messages with as much of the answer."""
        return len(self.encode_with(messages, answer)) // BLOCK * BLOCK

    def encode_with(self, messages: Sequence[Message], answer: str) -> list[int]:
        """A random model's answer becomes other tokens when it is read; a real one's the same again."""
        said = [*messages, {"role": "assistant", "content": answer}] if answer.strip() else list(messages)
        return self.text.encode_chat(said, continue_final=bool(answer.strip()))

    def ask(self, messages: Sequence[Message], max_tokens: int = 4, **fields: object) -> tuple[str, int, int]:
        """The answer, what of the prompt came from the cache, and what could have."""
        could = self.reusable(plain(messages))
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens, **fields}
        answer = self.server.post("/v1/chat/completions", body)
        assert answer.status == 200, answer
        self.known.append(self.text.encode_chat(plain(messages)))
        return answer.text, answer.cached_tokens, could


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def plain(messages: Sequence[Message]) -> list[Message]:
    """As the model sees them: without markers, and with text for parts."""
    shown: list[Message] = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        lines = [line for line in text.split("\n") if "<total_tokens>" not in line]
        if kept := "\n".join(lines).rstrip():
            role = "system" if message["role"] == "developer" else message["role"]
            shown.append({**message, "role": role, "content": kept if len(kept) < len(text.rstrip()) else text})
    return shown


def said(*turns: str, system: str = RULES) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}, *({"role": roles[i % 2], "content": t} for i, t in enumerate(turns))]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("wide") / "wide", max_position_embeddings=32768)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps recurrent state beside rows: it cannot be cut back to where a prompt departs."""
    model = family_model(tmp_path_factory.mktemp("thinker") / "thinker", "qwen3_5", max_position_embeddings=32768)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": THINKS}))
    return model


@pytest.fixture(scope="module")
def server(wide: Path, thinker: Path, smollm2: Path) -> Iterator[Server]:
    with running({"wide": wide, "thinker": thinker, "smollm2": smollm2}) as server:
        yield server


@pytest.fixture
def agent(server: Server, wide: Path) -> Agent:
    return Agent(server, "wide", Text.open(wide))


def test_a_counter_in_the_system_prompt_and_between_turns_costs_nothing(agent: Agent) -> None:
    turns: list[str] = [TASK * 4]
    for turn in range(4):
        counters = "\n".join(LEFT.format(90000 - 7 * n) for n in range(turn + 1))
        messages = said(*turns, system=f"Counters. {RULES}\n\n{counters}")
        messages[2:2] = [{"role": "system", "content": LEFT.format(100 * turn + n)} for n in range(turn)]
        answer, cached, could = agent.ask(messages)
        assert cached >= could and (turn == 0) == (could == 0), (turn, cached, could)
        turns += [answer or "Yes.", f"Result of call {turn}: {TASK}"]


def test_an_edited_last_message_reuses_all_before_it(agent: Agent) -> None:
    first, _, _ = agent.ask(said(TASK, system=f"Edits. {RULES}"))
    history = (TASK, first or "Yes.")
    agent.ask(said(*history, "Now write tests for it.", system=f"Edits. {RULES}"))
    _, cached, could = agent.ask(said(*history, "No, rather document it.", system=f"Edits. {RULES}"))
    assert cached >= could > len(agent.text.encode_chat(said(TASK, system=f"Edits. {RULES}"))) - 2 * BLOCK


def test_a_role_or_parts_instead_of_text_change_nothing(agent: Agent) -> None:
    system = f"Parts. {RULES}"
    agent.ask(said(TASK * 4, system=system))
    parts: list[Message] = [
        {"role": "developer", "content": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": TASK * 4}]},
    ]
    _, cached, could = agent.ask(parts)
    assert cached >= could > 0


def test_titles_and_tags_asked_for_in_between_do_not_cost_the_conversation(agent: Agent) -> None:
    """As Open WebUI does after an answer, and opencode beside the first one."""
    turns = [TASK * 4]
    system = f"Titles. {RULES}"
    for turn in range(3):
        sides = [[{"role": "user", "content": f"{kind} {TITLE}\n{' '.join(turns)}"}] for kind in ("title", "tags", "next")]
        asked = [said(*turns, system=system), *sides]
        (answer, cached, could), *_ = at_once([lambda messages=messages: agent.ask(messages) for messages in asked])
        assert cached >= could and (turn == 0) == (could == 0), (turn, cached, could)
        turns += [answer or "Yes.", f"And then? {TASK}"]


def test_sub_agents_at_once_share_what_the_agent_above_them_has_read(agent: Agent) -> None:
    system = f"Parallel. {RULES}"
    turns = (TASK * 4, "Yes.")
    agent.ask(said(TASK * 4, system=system))
    main = Stream(agent.server, "wide", "", messages=said(*turns, "Go on.", system=system), max_tokens=400)
    main.until_content()
    tasks = [said(*turns, f"Sub-agent {n}: look at file {n}. {TASK}", system=system) for n in range(4)]
    could = min(agent.reusable(task) for task in tasks)
    answers = at_once([lambda task=task: agent.ask(task) for task in tasks])
    assert main.rest()[-1] == "[DONE]"
    assert could > 0 and all(cached >= could for _, cached, _ in answers), (could, answers)


def test_thoughts_that_go_when_the_user_speaks_again_cost_no_more_than_what_came_after_them(
    server: Server, thinker: Path
) -> None:
    agent = Agent(server, "thinker", Text.open(thinker))
    messages = said(TASK, system=f"Think. {RULES}")
    for turn in range(7):
        _, cached, could = agent.ask(messages)
        assert cached >= could and (turn == 0) == (could == 0), (turn, cached, could)
        messages.append({"role": "assistant", "reasoning_content": f"Thought {turn}: {TASK}", "content": f"Call {turn}."})
        messages.append({"role": "user" if turn % 3 == 2 else "tool", "content": f"Result {turn}. {TASK}"})


def test_how_much_to_think_reaches_the_template_and_what_the_request_says_to_it_wins(server: Server, thinker: Path) -> None:
    agent = Agent(server, "thinker", Text.open(thinker))
    prompts = {
        thinks: len(agent.text.encode_chat(said("hi", system="Think."), template_kwargs={"enable_thinking": thinks}))
        for thinks in (True, False)
    }
    for fields, thinks in (
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ):
        body = {"model": "thinker", "messages": said("hi", system="Think."), "max_tokens": 1, **fields}
        assert server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == prompts[thinks], fields


def test_an_answer_that_was_broken_off_counts_as_read_and_can_be_continued(server: Server, smollm2: Path) -> None:
    agent = Agent(server, "smollm2", Text.open(smollm2))
    question = said("Write a long story about a fox and a dog who walk to the sea.", system=f"You tell stories. {TASK * 4}")
    stream = Stream(server, "smollm2", "", messages=question, max_tokens=400)
    while agent.reusable_with(question, stream.text) == agent.reusable_with(question, ""):
        assert stream.event() is not None
    stream.until_content()  # the last token of the block has been read by the model
    stream.close()
    agent.known.append(agent.encode_with(question, stream.text))
    broken_off: list[Message] = [*question, {"role": "assistant", "content": stream.text}]
    go_on: Message = {"role": "user", "content": "Go on."}
    for then, shape in (([go_on], {}), ([], {"continue_final_message": True})):
        could = agent.reusable([*broken_off, *then], continue_final=bool(shape))
        _, cached, _ = agent.ask([*broken_off, *then], max_tokens=1, **shape)
        assert cached >= could > agent.reusable_with(question, ""), (cached, could)
