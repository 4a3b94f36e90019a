"""What is read from a model directory: end tokens, context, vocabulary, templates; and what is said of a broken one."""

import json
from pathlib import Path

import pytest

from tests.stands import tokenizer_models
from tests.stands.models import tiny_model
from worker.text import ModelUnreadable, TemplateError, Text, TooLong

USER: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tokenizer_models.byte_level(tmp_path / "model")


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that was turned into tokens."""
    lengths: list[int] = []
    original = Text._tokens

    def noted(text: Text, given: str, *, special_tokens: bool) -> list[int]:
        lengths.append(len(given))
        return original(text, given, special_tokens=special_tokens)

    monkeypatch.setattr(Text, "_tokens", noted)
    return lengths


def test_a_text_that_is_much_too_long_is_not_tokenized_to_its_end(
    tmp_path: Path, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.text.LOOK_CHARS", 1000)
    text = Text.open(tiny_model(tmp_path / "tiny"))
    words = "the quick brown fox " * 1000
    tokens = len(text.encode_text(words))
    tokenized.clear()
    with pytest.raises(TooLong) as caught:
        text.encode_text(words, most_tokens=100)
    assert tokenized == [1000]
    assert 100 < caught.value.tokens <= tokens
    tokenized.clear()
    assert len(text.encode_text(words, most_tokens=tokens)) == tokens, "what fits is never refused"
    assert tokenized[-1] == len(words)
    blanks = " " * 30_000
    few = len(text.encode_text(blanks))
    assert len(text.encode_text(blanks, most_tokens=few)) == few, "however many characters a token is"


def test_end_tokens_are_those_of_all_three_files_together(path: Path) -> None:
    write(path, "generation_config.json", {"eos_token_id": [11, 12]})
    write(path, "config.json", {"eos_token_id": 13, "text_config": {"eos_token_id": [14]}})
    end = Text.open(path).encode_text("<end>")
    assert Text.open(path).eos_ids == {11, 12, 13, 14, *end}


def test_a_special_token_may_be_an_object_or_stand_in_the_special_tokens_map(path: Path) -> None:
    write(path, "tokenizer_config.json", {"bos_token": {"content": "<s>"}})
    write(path, "special_tokens_map.json", {"eos_token": {"content": "</s>"}, "bos_token": "<end>"})
    text = Text.open(path)
    assert [text.bos_id] == text.encode_text("<s>")
    assert text.eos_ids == set(text.encode_text("</s>"))


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 131072}, "max_position_embeddings": 7}, 131072),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": None, "seq_length": 512}, 512),
        ({}, 32768),
    ],
)
def test_the_context_is_found_under_the_name_the_architecture_uses(path: Path, config: object, context: int) -> None:
    write(path, "config.json", config)
    assert Text.open(path).context == context


def test_the_vocabulary_is_the_embeddings_and_without_one_the_tokenizers(path: Path) -> None:
    entries = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    assert Text.open(path).vocab_size == len(entries)
    write(path, "config.json", {"text_config": {"vocab_size": 1000}})
    assert Text.open(path).vocab_size == 1000


def test_recommended_sampling_is_passed_on(path: Path) -> None:
    write(path, "generation_config.json", {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 9, "top_p": None})
    assert Text.open(path).defaults == {"temperature": 0.6, "top_k": 20}


def test_a_limit_saved_with_the_tokenizer_does_not_cut_prompts(path: Path) -> None:
    saved = json.loads((path / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    saved["padding"]["pad_to_multiple_of"] = None
    expected = Text.open(path).encode_text("the quick brown fox")
    (path / "tokenizer.json").write_text(json.dumps(saved))
    assert Text.open(path).encode_text("the quick brown fox") == expected


def test_a_template_file_wins_over_the_tokenizer_config_and_that_over_chat_template_json(path: Path) -> None:
    write(path, "chat_template.json", {"chat_template": "c"})
    write(path, "tokenizer_config.json", {})
    assert Text.open(path).decode(Text.open(path).encode_chat(USER)) == "c"
    write(path, "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "b"}]})
    assert Text.open(path).decode(Text.open(path).encode_chat(USER)) == "b"
    (path / "chat_template.jinja").write_text("a")
    assert Text.open(path).decode(Text.open(path).encode_chat(USER)) == "a"


def test_of_several_templates_the_one_for_tools_is_used_when_there_are_tools(path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(path, "tokenizer_config.json", {"chat_template": named})
    text = Text.open(path)
    assert text.decode(text.encode_chat(USER)) == "plain"
    assert text.decode(text.encode_chat(USER, tools=[])) == "plain"
    assert text.decode(text.encode_chat(USER, tools=[{"type": "function"}])) == "tools"


def test_without_a_template_the_error_says_what_works_instead(path: Path) -> None:
    write(path, "tokenizer_config.json", {})
    with pytest.raises(TemplateError, match="/v1/completions"):
        Text.open(path).encode_chat(USER)
    write(path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(TemplateError, match=r"rag.*/v1/completions"):
        Text.open(path).encode_chat(USER)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"a":', "tokenizer_config.json"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_a_broken_directory_is_unreadable_and_the_message_names_the_file(
    path: Path, file: str, content: str | None, words: str
) -> None:
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(ModelUnreadable, match=words):
        Text.open(path)


def test_a_sentencepiece_model_is_converted(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([tokenizer_models.WORDS] * 20))
    path = tokenizer_models.model_directory(tmp_path / "model", None)
    write(path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(path / "tokenizer"), vocab_size=400, model_type="bpe", byte_fallback=True
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    text = Text.open(path)
    words = "The quick brown fox jumps over 🙂"
    assert [i for i in text.encode_text(words) if i != text.bos_id] == reference.encode(words)
    assert text.decode(text.encode_text(words)) == words


def test_a_tokenizer_that_cannot_be_converted_says_why(tmp_path: Path) -> None:
    path = tokenizer_models.model_directory(tmp_path / "model", None)
    (path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelUnreadable, match="cannot be converted"):
        Text.open(path)
