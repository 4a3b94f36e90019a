"""Scores as the engine reports them, by id, with the tokens' texts put beside the ids.

Runs where sockets are, not on the engine thread.
"""

from collections.abc import Sequence
from typing import cast

from supervisor.protocol import Code
from worker.prompt import Refused
from worker.vocabulary import TokensUnreadable, Vocabulary


def be_readable(vocabulary: Vocabulary) -> None:
    """Call in the pool, before scores are asked for. Raises Refused."""
    try:
        vocabulary.raw(0)
    except TokensUnreadable as e:
        raise Refused(Code.UNSUPPORTED, f"logprobs are not supported with this model's tokenizer: {e}") from e


def named(vocabulary: Vocabulary, entries: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [
        {**_named(vocabulary, entry), "top": [_named(vocabulary, top) for top in cast("list[dict[str, object]]", entry["top"])]}
        for entry in entries
    ]


def _named(vocabulary: Vocabulary, entry: dict[str, object]) -> dict[str, object]:
    text = vocabulary.text_of(cast("int", entry["id"]))
    return {"id": entry["id"], "token": text.token, "bytes": text.raw, "special": text.is_special, "logprob": entry["logprob"]}
