"""Agents' volatile headers leave the head of the system prompt, their markers every system message, and nothing else does."""

import pytest

from worker.conversation import Messages
from worker.volatile import Volatile, volatile_of, without_volatile, without_volatile_headers, without_volatile_markers

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


LEFT = "<total_tokens>{} tokens left</total_tokens>"
NAMES = ("total_tokens", "usage")


def system_left(content: object) -> object:
    (message, _) = without_volatile_markers([{"role": "system", "content": content}, USER], NAMES)
    return message["content"]


@pytest.mark.parametrize("between", ["\n", "\n\n", "\n \n", ""])
@pytest.mark.parametrize("end", ["", "\n"])
def test_however_many_markers_there_are_the_same_system_prompt_is_left(between: str, end: str) -> None:
    shown = {
        system_left("You are an agent.\n\n" + between.join(LEFT.format(n) for n in range(count)) + end) for count in (1, 2, 7)
    }
    assert shown == {"You are an agent." + end}


def test_a_marker_leaves_what_stands_around_it() -> None:
    assert system_left(f"{LEFT.format(1)}\nYou are.\n  {LEFT.format(2)} <usage>3</usage>\r\nBe brief.") == "You are.\nBe brief."


def test_parts_and_messages_of_nothing_but_markers_go() -> None:
    parts = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": LEFT.format(9)}, {"type": "image"}]
    answer: dict[str, object] = {"role": "assistant", "content": "Yes."}
    notes: Messages = [{"role": "system", "content": text} for text in (LEFT.format(8), f"Mind this.\n{LEFT.format(7)}")]
    assert without_volatile_markers([{"role": "developer", "content": parts}, USER, notes[0], answer, notes[1]], NAMES) == [
        {"role": "developer", "content": [parts[0], parts[2]]},
        USER,
        answer,
        {"role": "system", "content": "Mind this."},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": LEFT.format(1)},
        {"role": "tool", "content": LEFT.format(1), "tool_call_id": "c"},
        {"role": "system", "content": f"Heed {LEFT.format(1)}"},
        {"role": "system", "content": "<total_tokens>"},
        {"role": "system", "content": "<total_tokens>1</usage>"},
        {"role": "system", "content": "<total_tokens>\n1\n</total_tokens>"},
        {"role": "system", "content": "<totals>1</totals>"},
        {"role": "system", "content": None},
        {"role": "system", "content": ["odd", {"type": "text", "text": 7}]},
        {"role": "system"},
    ],
)
def test_what_is_no_marker_of_the_systems_is_left_alone(message: dict[str, object]) -> None:
    assert without_volatile_markers([message, USER], NAMES) == [message, USER]


def test_markers_and_headers_go_together_and_each_can_be_switched_off() -> None:
    messages: Messages = [{"role": "system", "content": f"{HEADER.format('a1')}\nYou are.\n{LEFT.format(4)}"}, USER]
    both = volatile_of({"volatile_headers": list(PREFIXES), "volatile_markers": list(NAMES)})
    assert without_volatile(messages, both)[0]["content"] == "You are."
    assert without_volatile(messages, Volatile()) == messages
    only: Messages = [{"role": "system", "content": LEFT.format(4)}]
    assert without_volatile(only, both) == [{"role": "system", "content": ""}]
