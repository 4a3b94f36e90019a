"""Speculative decoding: a small model proposes a few tokens, the large one checks them all in one forward pass.

The draft model only proposes. Every token is chosen by the large model, the request's own sampler and processors, one place
after the other as without a draft, and the first proposal that is not what was chosen ends the round; so an answer never
depends on the draft. It keeps its own cache, of one sequence at a time, and computes it anew where the large model's was
restored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache  # pyright: ignore[reportUnknownVariableType]

from worker.admission import KvCost
from worker.checkpoint import open_checkpoint
from worker.faults import ModelUnloadable
from worker.job import LoadSpec
from worker.kv_leaves import LeafKind, NotCacheable, describe, leaves_of
from worker.loader import LoadedModel, Progress, load
from worker.mlx_types import Cache
from worker.text import ModelUnreadable, Text

_trim = cast("Callable[[Cache, int], int]", trim_prompt_cache)


@dataclass(slots=True)
class Counts:
    proposed: int = 0
    accepted: int = 0


class DraftModel:
    """The model and what all its proposals came to."""

    def __init__(self, name: str, loaded: LoadedModel, vocab_size: int, most_tokens: int) -> None:
        """`vocab_size` is the large model's: output layers are padded, and not all alike."""
        self.name = name
        self.loaded = loaded
        self.vocab_size = min(vocab_size, loaded.vocab_size)
        self.most_tokens = most_tokens
        self.counts = Counts()


class Draft:
    """What the draft model knows of one sequence."""

    def __init__(self, model: DraftModel) -> None:
        self.counts = Counts()
        self.cache = model.loaded.new_cache()
        self._model = model
        self._seen_tokens = 0

    def behind(self, tokens: int) -> int:
        return tokens - self._seen_tokens

    def catch_up(self, tokens: Sequence[int], most_tokens: int) -> None:
        """Reads the next of `tokens`, at most so many."""
        fed = tokens[self._seen_tokens : self._seen_tokens + most_tokens]
        self._forward(mx.array([fed]))
        mx.eval([leaf.state for leaf in self.cache])  # pyright: ignore[reportUnknownMemberType]
        self._seen_tokens += len(fed)

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """What may come after `tokens`, of which there must be some that it has not read."""
        fed = mx.array([list(tokens[self._seen_tokens :])])
        proposed: list[mx.array] = []
        for _ in range(self._model.most_tokens):
            logits = self._forward(fed)[:, -1, : self._model.vocab_size]
            fed = mx.argmax(logits, axis=-1, keepdims=True)
            proposed.append(fed)
        # What was proposed last has not been read.
        self._seen_tokens = len(tokens) + len(proposed) - 1
        return cast("list[int]", mx.concatenate(proposed, axis=1)[0].tolist())

    def settle(self, tokens: int, proposed: int, accepted: int) -> None:
        """The sequence has so many tokens now: forgets what was read beyond them."""
        self._seen_tokens -= rewind(self.cache, max(0, self._seen_tokens - tokens))
        for counts in (self.counts, self._model.counts):
            counts.proposed += proposed
            counts.accepted += accepted

    def _forward(self, ids: mx.array) -> mx.array:
        # The large model's padding has no row here. Such a token never comes up, but what it would read is not ours.
        return self._model.loaded.model(mx.minimum(ids, self._model.loaded.vocab_size - 1), cache=self.cache)


def rewind(cache: Cache, tokens: int) -> int:
    """Takes the last tokens back; returns how many."""
    return _trim(cache, tokens) if tokens else 0


def joined(large: LoadedModel, draft: DraftModel) -> LoadedModel:
    """The large model with what both take. Raises ModelUnloadable where one of the two cannot take tokens back."""
    for loaded, what in ((large, "this model"), (draft.loaded, draft.name)):
        if (reason := _why_not_rewound(loaded.warm_cache)) is not None:
            raise ModelUnloadable(f"draft_model {draft.name} cannot be used: {what} cannot take tokens back, as {reason}")
    cost = large.kv_cost
    own = draft.loaded.kv_cost.layers
    early = None if cost.early is None else KvCost((*cost.early.layers, *own))
    kv_cost = replace(cost, layers=(*cost.layers, *own), early=early)
    return replace(large, weights_bytes=large.weights_bytes + draft.loaded.weights_bytes, kv_cost=kv_cost)


def open_draft(spec: LoadSpec, model: LoadedModel, progress: Progress) -> DraftModel | None:
    """The model's draft model, where the settings name one. Raises LoadFailed."""
    name, place, most_tokens = (spec.settings.get(key) for key in ("draft_model", "draft_path", "num_draft_tokens"))
    if not (isinstance(name, str) and isinstance(place, str) and isinstance(most_tokens, int)):
        return None
    trust, model_type = bool(spec.settings.get("trust_remote_code")), spec.settings.get("draft_model_type")
    try:
        own, drafts = (Text.open(Path(path)).tokenizer.get_vocab() for path in (spec.ref.path, place))
    except ModelUnreadable as e:
        raise ModelUnloadable(f"draft_model {name}: {e}") from e
    check_same_tokens(name, own, drafts)
    instead = model_type if isinstance(model_type, str) else None
    checkpoint = open_checkpoint(Path(place), trust_remote_code=trust, model_type=instead)
    loaded = load(checkpoint, progress, trust_remote_code=trust)
    return DraftModel(name, loaded, model.vocab_size, most_tokens)


def check_same_tokens(name: str, own: dict[str, int], drafts: dict[str, int]) -> None:
    """Of two vocabularies, by token. Raises ModelUnloadable."""
    if own == drafts:
        return
    token = min(own.items() ^ drafts.items(), key=lambda item: (item[1], item[0]))[0]
    raise ModelUnloadable(
        f"draft_model {name} has another vocabulary: token {token!r} is {_id(drafts, token)} there and {_id(own, token)} here"
    )


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"number {vocabulary[token]}" if token in vocabulary else "not"


def _why_not_rewound(warm: Cache) -> str | None:
    for path, leaf in leaves_of(warm):
        try:
            kind = describe(path, leaf).kind
        except NotCacheable as e:
            return str(e)
        if kind is not LeafKind.ROWS:
            return f"layer {path} keeps {'a window' if kind is LeafKind.WINDOW else 'a state'}"
    return None
