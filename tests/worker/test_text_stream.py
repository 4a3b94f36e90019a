"""Text as its tokens come: the pieces join to the decoded whole, without broken characters, and stop strings are cut out."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stands import tokenizer_models
from worker.text import Text
from worker.text_stream import StopStrings

PROMPT = "The capital of France is"
EMOJI = "a 🙂👩‍👩‍👧 é 日本語 b"


@pytest.fixture(scope="module", params=["byte_level", "llama", "gemma"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "byte_level":
        return Text.open(tokenizer_models.byte_level(path))
    return Text.open(tokenizer_models.sentencepiece(path, strips_space=request.param == "llama"))


def pieces(text: Text, prompt: str, answer_ids: list[int], stops: list[str] | None = None) -> list[str]:
    stream = text.stream(text.encode_text(prompt), stops or [])
    shown: list[str] = []
    for token in answer_ids:
        shown.append(stream.push(token))
        if stream.stopped_by is not None:
            return shown
    return [*shown, stream.close()]


def continuation(text: Text, prompt: str, answer: str) -> list[int]:
    """The tokens of `answer` as a model would produce them after `prompt`."""
    ids = text.encode_text(prompt + answer)
    start = text.encode_text(prompt)
    assert ids[: len(start)] == start
    return ids[len(start) :]


def test_a_character_split_over_tokens_comes_whole_and_never_as_replacement_characters(text: Text) -> None:
    ids = continuation(text, PROMPT, " " + EMOJI)
    shown = pieces(text, PROMPT, ids)
    assert len(ids) > len(EMOJI)
    assert "".join(shown) == " " + EMOJI
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_cut_in_half_at_the_end_is_left_out(text: Text) -> None:
    ids = continuation(text, PROMPT, " x🙂")
    assert "".join(pieces(text, PROMPT, ids[:-1])) == " x"


def test_the_space_before_the_first_word_is_kept(text: Text) -> None:
    ids = continuation(text, PROMPT, " Paris")
    assert "".join(pieces(text, PROMPT, ids)) == " Paris"
    assert "".join(pieces(text, "", ids)) in {" Paris", "Paris"}  # with nothing before it the decoder decides


def test_of_a_continued_prompt_only_the_last_tokens_are_stepped_and_none_of_their_text_is_shown(text: Text) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 50 + "and"
    ids = continuation(text, prompt, " the rest")
    assert "".join(pieces(text, prompt, ids)) == " the rest"


def test_a_prompt_that_ends_inside_a_character_is_continued_by_the_rest_of_it(text: Text) -> None:
    ids = text.encode_text("The 🙂 fox")
    cut = next(at for at in range(1, len(ids)) if text.decode(ids[:at]).endswith("\ufffd"))
    stream = text.stream(ids[:cut], [])
    assert "".join(map(stream.push, ids[cut:])) + stream.close() == "🙂 fox"


def test_a_prompt_that_ends_inside_a_character_leaves_nothing_in_an_answer_that_does_not_complete_it(text: Text) -> None:
    ids = text.encode_text("The 🙂 fox")
    cut = next(at for at in range(1, len(ids)) if text.decode(ids[:at]).endswith("\ufffd"))
    rest = continuation(text, PROMPT, " the rest")
    stream = text.stream(ids[:cut], ["\ufffd"])
    assert "".join(map(stream.push, rest)) + stream.close() == " the rest"
    assert text.decode(ids[:cut] + rest) == text.decode(ids[:cut]) + " the rest", "so an echo says it once"


def test_ten_thousand_tokens_stream_to_what_decode_gives(text: Text) -> None:
    chance = random.Random(7)
    words = [*tokenizer_models.WORDS.split(), "🙂", "日本語", "naïve", "\n\n", "  two", "x = {1: 'y'}"]
    answer = " ".join(chance.choice(words) for _ in range(6000))
    ids = continuation(text, PROMPT, " " + answer)
    assert len(ids) >= 10_000
    began = time.thread_time()
    shown = "".join(pieces(text, PROMPT, ids, stops=["never to be seen", "\0"]))
    took_s = time.thread_time() - began
    whole = text.decode(text.encode_text(PROMPT) + ids)
    assert text.decode(text.encode_text(PROMPT)) + shown == whole
    assert took_s < 10_000 * 1e-4  # linear: a detokenizer that decodes all of it again takes minutes


@settings(max_examples=150, deadline=None)
@given(answer=st.text(max_size=60))
def test_any_text_streams_to_itself(text: Text, answer: str) -> None:
    ids = text.encode_text(PROMPT + "\n" + answer)
    start = text.encode_text(PROMPT + "\n")
    if ids[: len(start)] != start:
        return  # the first character merged with the prompt's last
    shown = "".join(pieces(text, PROMPT + "\n", ids[len(start) :]))
    assert text.decode(ids) == text.decode(start) + shown or answer.endswith("\ufffd")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_neither_raises_nor_piles_up(text: Text, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, text.vocab_size - 1), max_size=80))
    stream = text.stream([], [])
    shown = [stream.push(token) for token in ids]
    silent = 0
    for token, piece in zip(ids, shown, strict=True):
        visible = text.decode([token]) != ""
        silent = 0 if piece or not visible else silent + 1
        assert silent <= 17


def test_special_tokens_are_not_shown_and_do_not_eat_the_next_space(text: Text) -> None:
    end = next(iter(text.eos_ids))
    word = continuation(text, PROMPT, " Paris")
    stream = text.stream(text.encode_text(PROMPT), [])
    shown = "".join(stream.push(token) for token in [*word, *[end] * 40, *word])
    assert shown == " Paris Paris"


# ------------------------------------------------------------------ stop strings


def test_a_stop_string_that_starts_inside_one_token_and_ends_in_another_is_trimmed(text: Text) -> None:
    ids = continuation(text, PROMPT, " the people who were there. Stop here, please.")
    shown = pieces(text, PROMPT, ids, stops=["re. Stop he"])
    assert "".join(shown) == " the people who were the"


def test_text_that_only_began_like_a_stop_string_is_shown_when_it_turns_out_otherwise(text: Text) -> None:
    answer = " the people who were there"
    shown = pieces(text, PROMPT, continuation(text, PROMPT, answer), stops=["there was", "people of"])
    assert "".join(shown) == answer
    assert not any(answer.endswith(piece) and piece.endswith("there") for piece in shown[:-1])  # held to the very end


@pytest.mark.parametrize(("stop", "before"), [("Paris", " "), (" Paris", ""), ("paris", " Paris.")])
def test_a_stop_string_matches_text_and_not_tokens(text: Text, stop: str, before: str) -> None:
    ids = continuation(text, PROMPT, " Paris.")
    stream = text.stream(text.encode_text(PROMPT), [stop])
    shown = "".join(stream.push(token) for token in ids)
    if stop == "paris":
        assert stream.stopped_by is None
        shown += stream.close()
    else:
        assert stream.stopped_by == stop
        assert stream.close() == ""
    assert shown == before


def test_a_stop_string_in_the_prompt_does_not_stop_the_answer(text: Text) -> None:
    ids = continuation(text, PROMPT, " Paris")
    assert "".join(pieces(text, PROMPT, ids, stops=["France", "is P"])) == " Paris"


def completed_first(answer: str, stops: list[str]) -> tuple[str, str] | None:
    """What a reader that goes character by character would stop at: (text before, stop)."""
    for end in range(1, len(answer) + 1):
        at_end = [stop for stop in stops if answer[:end].endswith(stop)]
        if at_end:
            longest = max(at_end, key=len)
            return answer[: end - len(longest)], longest
    return None


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab.", max_size=5), max_size=8),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_however_the_text_is_cut_the_first_complete_stop_string_wins(parts: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for part in parts:
        shown += matcher.feed(part)
        if matcher.matched is None:
            assert not any(shown.endswith(stop) for stop in stops)
    expected = completed_first("".join(parts), stops)
    if expected is None:
        assert matcher.matched is None
        assert shown + matcher.release() == "".join(parts)
    else:
        assert (shown, matcher.matched) == expected


def test_no_more_is_held_back_than_could_still_become_a_stop_string() -> None:
    matcher = StopStrings(["END", "NOW"])
    assert [matcher.feed(part) for part in ["abc", "dE", "N", "x", "NO", "NO"]] == ["abc", "d", "", "ENx", "", "NO"]
