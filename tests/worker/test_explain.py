"""A miss is explained: where a prompt left the nearest earlier one, in numbers for the log and in words for who asks."""

import random
import time

import pytest

from worker.explain import EXPLANATIONS_KEPT, PROMPTS_KEPT, TOKENS_KEPT, Explanation, PromptMemory, Verdict

ROOT = b"root"
BLOCK = 16


def tokens(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def explain(memory: PromptMemory, rid: str, prompt: list[int], cached: int, root: bytes = ROOT) -> Explanation:
    memory.note(rid, root, prompt, cached, BLOCK)
    (found,) = memory.of(rid)
    return found


def words(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore[call-overload]


def test_a_changed_token_is_named_with_the_text_around_it_and_the_place_where_both_agree_again() -> None:
    memory, prompt = PromptMemory(), tokens(300)
    memory.note("r1", ROOT, prompt, 0, BLOCK)
    changed = [*prompt[:100], 7777, 7778, *prompt[101:]]
    found = memory.note("r2", ROOT, changed, 96, BLOCK)
    assert found is not None and found.nearest is not None
    assert (found.verdict, found.nearest.rid, found.nearest.shared_tokens) == (Verdict.PARTED, "r1", 100)
    assert found.nearest.again_at == (102, 101)
    assert "leaves r1 (300 tokens) at token 100; they agree again from its token 102 on" in found.summary()
    summary, both, this, earlier = found.lines(words)
    assert both.endswith(f"{words(prompt[76:100])}'")
    assert words(changed[100:124]) in this and words(prompt[100:124]) in earlier
    assert "7777" not in summary, "a log holds no text of prompts"


def test_a_header_that_changes_at_the_very_beginning_is_seen_for_what_it_is() -> None:
    """Fewer tokens than a block are shared, as with any two conversations; but here the rest is the same."""
    memory, rest = PromptMemory(), tokens(400)
    memory.note("r1", ROOT, [1, 2, 3, 901, 902, *rest], 0, BLOCK)
    found = memory.note("r2", ROOT, [1, 2, 3, 911, *rest], 0, BLOCK)
    assert found is not None and found.nearest is not None
    assert (found.verdict, found.nearest.shared_tokens, found.nearest.again_at) == (Verdict.PARTED, 3, (4, 5))


def test_another_conversation_is_new_and_is_not_worth_a_line() -> None:
    memory = PromptMemory()
    memory.note("r1", ROOT, [1, 2, 3, *tokens(300)], 0, BLOCK)
    assert memory.note("r2", ROOT, [1, 2, 3, *tokens(300, seed=2)], 0, BLOCK) is None
    assert memory.of("r2")[0].verdict is Verdict.NEW


def test_the_next_turn_grew_and_what_was_shared_but_is_not_kept_is_gone() -> None:
    memory, prompt = PromptMemory(), tokens(200)
    memory.note("r1", ROOT, prompt, 0, BLOCK)
    memory.remember("r1", ROOT, [*prompt, *tokens(40, seed=2)])
    turn = [*prompt, *tokens(40, seed=2), *tokens(60, seed=3)]
    assert memory.note("r2", ROOT, turn, 240, BLOCK) is None
    assert memory.of("r2")[0].verdict is Verdict.GREW
    gone = memory.note("r3", ROOT, turn, 64, BLOCK)
    assert gone is not None and gone.verdict is Verdict.GONE
    assert "from token 64 on that is not kept" in gone.summary()


def test_an_answer_that_is_sent_back_with_another_end_costs_less_than_a_block_and_no_line() -> None:
    memory, prompt = PromptMemory(), tokens(200)
    memory.remember("r1", ROOT, [*prompt, 5, 6, 7])
    assert memory.note("r2", ROOT, [*prompt, 5, 6, 8, *tokens(90, seed=4)], 192, BLOCK) is None


def test_a_repeat_is_whole() -> None:
    memory = PromptMemory()
    memory.note("r1", ROOT, tokens(100), 0, BLOCK)
    assert explain(memory, "r2", tokens(100), 99).verdict is Verdict.WHOLE


def test_prompts_of_other_namespaces_and_salts_are_never_compared() -> None:
    memory = PromptMemory()
    memory.note("r1", b"alice", tokens(100), 0, BLOCK)
    assert explain(memory, "r2", tokens(100), 0, b"bob").nearest is None


def test_the_nearest_is_the_one_with_most_in_common_not_the_latest() -> None:
    memory, prompt = PromptMemory(), tokens(200)
    memory.note("near", ROOT, [*prompt[:150], *tokens(100, seed=5)], 0, BLOCK)
    memory.note("far", ROOT, [*prompt[:50], *tokens(100, seed=6)], 0, BLOCK)
    nearest = explain(memory, "r", prompt, 144).nearest
    assert nearest is not None and (nearest.rid, nearest.shared_tokens) == ("near", 150)


def test_all_prompts_of_a_request_are_found_by_its_id_and_no_others() -> None:
    memory = PromptMemory()
    for rid in ("req_1.0.0", "req_1.1.0", "req_12.0.0"):
        memory.note(rid, ROOT, tokens(20), 0, BLOCK)
    assert [e.rid for e in memory.of("req_1")] == ["req_1.0.0", "req_1.1.0"]


def test_memory_is_bounded_by_prompts_tokens_and_explanations() -> None:
    memory = PromptMemory()
    for number in range(EXPLANATIONS_KEPT + 10):
        memory.note(f"r{number}", ROOT, tokens(20, seed=number), 0, BLOCK)
    assert len(memory._prompts) == PROMPTS_KEPT
    assert not memory.of("r9") and memory.of("r10")
    for number in range(5):
        memory.remember(f"long{number}", ROOT, tokens(TOKENS_KEPT // 3, seed=number))
    assert sum(len(ids) for _, ids in memory._prompts.values()) <= TOKENS_KEPT
    memory.remember("endless", ROOT, tokens(TOKENS_KEPT + 5))
    assert list(memory._prompts) == ["endless"]


def test_a_conversation_is_remembered_once_however_many_turns_it_has() -> None:
    memory, prompt = PromptMemory(), tokens(500)
    for turn in range(1, 20):
        memory.note(f"r{turn}", ROOT, prompt[: turn * 20], 0, BLOCK)
    assert list(memory._prompts) == ["r19"]


@pytest.mark.parametrize("length", [1, 2, BLOCK])
def test_the_shortest_prompts_do_not_break_it(length: int) -> None:
    memory = PromptMemory()
    memory.note("r1", ROOT, tokens(length), 0, BLOCK)
    assert explain(memory, "r2", tokens(length, seed=2), 0).lines(words)


def test_a_prompt_that_says_one_thing_over_and_over_does_not_hold_up_the_engine() -> None:
    count, took_s = 100_000, list[float]()
    for _ in range(3):
        memory = PromptMemory()
        memory.note("r1", ROOT, [*tokens(32), *[5, 8] * (count // 2)], 0, BLOCK)
        began = time.thread_time()
        memory.note("r2", ROOT, [*tokens(32), 2000, *[5] * count], 0, BLOCK)
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.2
