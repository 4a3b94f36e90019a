"""What a model directory says about itself in its JSON files: context, end tokens, special tokens, templates, defaults.

Reads no weights and imports nothing of MLX, so the text worker knows as much about a model as the process that runs it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

UNSTATED_CONTEXT_TOKENS = 32_768
"""For recurrent models whose files name no limit."""

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Json = Mapping[str, object]


class ModelUnreadable(Exception):
    """The directory is not a model this build can open; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    config: Json
    generation: Json
    tokenizer: Json
    """tokenizer_config.json, completed from special_tokens_map.json."""

    @classmethod
    def read(cls, path: Path) -> "ModelFiles":
        """Raises ModelUnreadable where config.json is missing or a file is not a JSON object."""
        if not (path / "config.json").is_file():
            raise ModelUnreadable(f"{path} has no config.json")
        special = _read_json(path / "special_tokens_map.json")
        return cls(
            path=path,
            config=_read_json(path / "config.json"),
            generation=_read_json(path / "generation_config.json"),
            tokenizer={**special, **_read_json(path / "tokenizer_config.json")},
        )

    @property
    def context(self) -> int:
        """The longest sequence in tokens, prompt and answer together."""
        return self._number(*CONTEXT_KEYS) or UNSTATED_CONTEXT_TOKENS

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding: the token ids a request may name."""
        return self._number("vocab_size")

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens by id; those the tokenizer names by text are in `special_tokens`."""
        sources = (self.generation, self.config, _object(self.config.get("text_config")))
        return frozenset(i for source in sources for i in _ids(source.get("eos_token_id")))

    @property
    def bos_id(self) -> int | None:
        return next(iter(_ids(self.config.get("bos_token_id"))), None)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens with their text, as a chat template sees them."""
        named = {key: _token_text(self.tokenizer.get(key)) for key in SPECIAL_TOKEN_KEYS}
        return {key: text for key, text in named.items() if text is not None}

    @property
    def defaults(self) -> dict[str, object]:
        """Sampling defaults the model's authors recommend."""
        return {key: self.generation[key] for key in DEFAULT_KEYS if self.generation.get(key) is not None}

    @property
    def templates(self) -> dict[str, str]:
        """Chat templates by name; the usual one is "default". Files of their own win over tokenizer_config.json."""
        found = _named_templates(_read_json(self.path / "chat_template.json").get("chat_template"))
        found |= _named_templates(self.tokenizer.get("chat_template"))
        for file in sorted(self.path.glob("additional_chat_templates/*.jinja")):
            found[file.stem] = file.read_text(encoding="utf-8")
        single = self.path / "chat_template.jinja"
        if single.is_file():
            found["default"] = single.read_text(encoding="utf-8")
        return found

    @property
    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when any file that this or the tokenizer is read from does."""
        files = sorted((*self.path.glob("*.json"), *self.path.glob("*.jinja"), *self.path.glob("*.model")))
        return tuple((file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])

    def _number(self, *keys: str) -> int | None:
        """The first positive number under one of the keys; a text model nested in a larger one speaks for itself."""
        for source in (_object(self.config.get("text_config")), self.config):
            for key in keys:
                value = source.get(key)
                if isinstance(value, int) and value > 0:
                    return value
        return None


def _read_json(file: Path) -> Json:
    try:
        return _object(json.loads(file.read_text(encoding="utf-8")), file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ModelUnreadable(f"{file}: {e}") from e


def _object(value: object, file: Path | None = None) -> Json:
    if isinstance(value, dict):
        return cast("Json", value)
    if file is not None:
        raise ModelUnreadable(f"{file} is not a JSON object")
    return {}


def _ids(value: object) -> list[int]:
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int)]


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as an object with its `content`."""
    content = value if isinstance(value, str) else _object(value).get("content")
    return content if isinstance(content, str) else None


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    named = [_object(item) for item in cast("list[object]", value)] if isinstance(value, list) else []
    return {str(item.get("name")): str(item.get("template")) for item in named}
