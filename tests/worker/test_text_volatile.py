"""Agents' volatile header lines leave the head of the system prompt, and nothing else does."""

import pytest

from worker.conversation import Messages
from worker.volatile import without_volatile_headers

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch={};"
PREFIXES = ("x-anthropic-billing-header:", "x-turn:")
USER: dict[str, object] = {"role": "user", "content": "hi"}


def of(content: object, role: str = "system") -> Messages:
    return without_volatile_headers([{"role": role, "content": content}, USER], PREFIXES)


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("line", [HEADER.format("a1"), f"  {HEADER.format('b2')}", f"\n{HEADER.format('c3')}\nx-turn: 4\n"])
def test_a_header_at_the_head_of_a_system_text_is_removed_with_its_line(role: str, line: str) -> None:
    assert of(f"{line}\n\nYou are an agent.\nBe brief.", role) == [
        {"role": role, "content": "You are an agent.\nBe brief."},
        USER,
    ]


def test_a_block_that_is_only_a_header_is_removed_whole() -> None:
    parts = [{"type": "text", "text": HEADER.format("a1")}, {"type": "text", "text": "You are an agent.", "cache_control": {}}]
    assert of(parts) == [{"role": "system", "content": parts[1:]}, USER]


def test_a_system_message_that_is_only_a_header_is_removed_and_the_next_is_looked_at() -> None:
    messages: Messages = [
        {"role": "system", "content": HEADER.format("a1")},
        {"role": "system", "content": [{"type": "text", "text": "x-turn: 7\nYou are an agent."}]},
        USER,
    ]
    assert without_volatile_headers(messages, PREFIXES) == [
        {"role": "system", "content": [{"type": "text", "text": "You are an agent."}]},
        USER,
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": HEADER.format("a1")}],
        [{"role": "system", "content": f"You are an agent.\n{HEADER.format('a1')}"}, USER],
        [{"role": "system", "content": f"See {HEADER.format('a1')}"}, USER],
        [USER, {"role": "system", "content": HEADER.format("a1")}],
        [{"role": "system", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "You."}]}, USER],
        [{"role": "system", "content": [{"type": "image"}, {"type": "text", "text": HEADER.format("a1")}]}, USER],
        [{"role": "system", "content": None}, USER],
        [{"role": "system"}, USER],
        [],
    ],
)
def test_what_is_not_at_the_head_of_the_system_prompt_is_left_alone(messages: Messages) -> None:
    assert without_volatile_headers(messages, PREFIXES) == messages


def test_an_empty_list_switches_it_off() -> None:
    messages: Messages = [{"role": "system", "content": HEADER.format("a1") + "\nYou."}, USER]
    assert without_volatile_headers(messages, ()) == messages


def test_a_conversation_of_nothing_but_headers_keeps_its_message() -> None:
    assert without_volatile_headers([{"role": "system", "content": HEADER.format("a1")}], PREFIXES) == [
        {"role": "system", "content": ""}
    ]
