"""Tokens as bytes: for every kind of tokenizer the same as llguidance reads out of tokenizer.json by itself."""

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, models

from supervisor.protocol import Code
from tests.stands.models import smollm2_dir, tiny_model
from tests.stands.tokenizer_models import byte_level, sentencepiece
from worker.prompt import Refused
from worker.structured import compiled
from worker.text import Text
from worker.token_names import be_readable, named
from worker.vocabulary import Vocabulary

NO_CHARACTER = b"\xff"
"""llguidance uses this byte for special tokens and shows it as nothing."""


def vocabulary_of(text: Text) -> Vocabulary:
    return Vocabulary(text.tokenizer, text.vocab_size, text.eos_ids)


def assert_read_as_llguidance_does(text: Text) -> None:
    vocabulary = vocabulary_of(text)
    by_itself = LLTokenizer(text.tokenizer.to_str(), n_vocab=text.vocab_size, eos_token=sorted(text.eos_ids))
    for token in range(text.tokenizer.get_vocab_size()):
        expected = by_itself.decode_bytes([token])
        assert vocabulary.raw(token) in (expected, NO_CHARACTER), token
        assert vocabulary.matching.decode_bytes([token]) == expected, token
    assert vocabulary.matching.eos_tokens == by_itself.eos_tokens


@pytest.mark.parametrize("kind", ["tiny", "byte_level", "sentencepiece", "sentencepiece that strips"])
def test_tokens_are_the_bytes_they_stand_for(tmp_path: Path, kind: str) -> None:
    match kind:
        case "tiny":
            path = tiny_model(tmp_path / "m")
        case "byte_level":
            path = byte_level(tmp_path / "m")
        case _:
            path = sentencepiece(tmp_path / "m", strips_space=kind.endswith("strips"))
    text = Text.open(path)
    assert_read_as_llguidance_does(text)
    said = "The capital, é and 🙂."
    ids = text.tokenizer.encode(said, add_special_tokens=False).ids
    assert b"".join(vocabulary_of(text).raw(token) for token in ids).decode().strip() == said


@pytest.mark.real
def test_a_real_models_tokens_are_the_bytes_they_stand_for() -> None:
    assert_read_as_llguidance_does(Text.open(smollm2_dir()))


def test_ids_that_a_model_has_beyond_its_tokens_are_never_allowed(tmp_path: Path) -> None:
    text = Text.open(tiny_model(tmp_path / "m"))
    padded = Vocabulary(text.tokenizer, text.vocab_size + 60, text.eos_ids)
    matcher = LLMatcher(padded.matching, LLMatcher.grammar_from_regex("(?s:.*)"), log_level=0)
    allowed = matcher.compute_logit_bias()
    assert len(allowed) == text.vocab_size + 60
    assert not any(allowed[text.tokenizer.get_vocab_size() :]) and sum(map(bool, allowed)) > 300
    assert padded.raw(text.vocab_size + 3) == b""


def test_a_part_of_a_character_is_named_by_its_bytes(tmp_path: Path) -> None:
    text = Text.open(byte_level(tmp_path / "m"))
    vocabulary = vocabulary_of(text)
    first, *_ = text.tokenizer.encode("é", add_special_tokens=False).ids
    (entry,) = named(vocabulary, [{"id": first, "logprob": -1.5, "top": [{"id": 2, "logprob": -2.0}]}])
    assert entry == {
        "id": first,
        "token": "bytes:\\xc3",
        "bytes": b"\xc3",
        "special": False,
        "logprob": -1.5,
        "top": [{"id": 2, "token": "</s>", "bytes": b"</s>", "special": True, "logprob": -2.0}],
    }


def test_a_tokenizer_of_another_kind_is_refused_and_not_guessed_at() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    vocabulary = Vocabulary(words, 2, frozenset({0}))
    for ask in (lambda: be_readable(vocabulary), lambda: compiled(vocabulary, {"type": "regex", "regex": "a"})):
        with pytest.raises(Refused) as refused:
            ask()
        assert refused.value.code == Code.UNSUPPORTED
