"""Why a prompt was not in the cache: remembers the last prompts and finds where a new one left the nearest of them.

What is logged holds numbers only; the text around the parting is for whoever asks about that request. The engine thread notes,
any thread asks. Bounded; must not know MLX, blocks' bytes or tiers.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

PROMPTS_KEPT = 64
TOKENS_KEPT = 1_000_000
EXPLANATIONS_KEPT = 200
EXCERPT_TOKENS = 24
AGREE_TOKENS = 16
"""So many equal tokens in a row are the same text, not chance."""

Ids = NDArray[np.uint32]
Decode = Callable[[Sequence[int]], str]


class Verdict(StrEnum):
    WHOLE = "whole"
    """Less than a block was computed."""
    NEW = "new"
    """Nothing like it is remembered."""
    GREW = "grew"
    """It goes on where an earlier one ended."""
    PARTED = "parted"
    """It has the beginning of an earlier one, or its text behind a changed beginning."""
    GONE = "gone"
    """What it shares with an earlier one was not in the cache any more."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two prompts stop to agree, and where, if at all, they agree again."""

    rid: str
    tokens: int
    """Length of the earlier one."""
    shared_tokens: int
    again_at: tuple[int, int] | None
    """In this prompt and in the earlier one."""
    before: tuple[int, ...]
    here: tuple[int, ...]
    there: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    rid: str
    verdict: Verdict
    prompt_tokens: int
    cached_tokens: int
    nearest: Parting | None

    def summary(self) -> str:
        """Numbers only: fit for a log."""
        computed = self.prompt_tokens - self.cached_tokens
        text = f"{self.rid}: {self.prompt_tokens} prompt tokens, {self.cached_tokens} from the cache, {computed} computed: "
        near = self.nearest
        match self.verdict:
            case Verdict.WHOLE:
                return text + "all that a cache can give"
            case Verdict.GREW if near is not None:
                return text + f"it goes on where {near.rid} ended, at token {near.shared_tokens}"
            case Verdict.GONE if near is not None:
                return text + (
                    f"it agrees with {near.rid} up to token {near.shared_tokens}, but from token {self.cached_tokens} on that "
                    "is not kept (evicted, never written, damaged, or between two snapshots of a recurrent model)"
                )
            case Verdict.PARTED if near is not None:
                again = "" if near.again_at is None else f"; they agree again from its token {near.again_at[0]} on"
                return text + f"it leaves {near.rid} ({near.tokens} tokens) at token {near.shared_tokens}{again}"
            case _:
                return text + "no earlier prompt that this process remembers is like it"

    def lines(self, decode: Decode) -> list[str]:
        """With the text around the parting."""
        near = self.nearest
        if near is None or self.verdict is not Verdict.PARTED:
            return [self.summary()]
        return [
            self.summary(),
            f"  both end in  {decode(near.before)!r}",
            f"  this one     {decode(near.here)!r}",
            f"  the earlier  {decode(near.there)!r}",
        ]


class PromptMemory:
    def __init__(self) -> None:
        self._prompts: OrderedDict[str, tuple[bytes, Ids]] = OrderedDict()
        """By request id, latest last, with the root of their chains: namespace and salt. Engine thread only."""
        self._tokens = 0
        self._lock = threading.Lock()  # guards _explained
        self._explained: OrderedDict[str, Explanation] = OrderedDict()

    def note(self, rid: str, root: bytes, prompt: Sequence[int], cached_tokens: int, block_tokens: int) -> Explanation | None:
        """Call when a prompt is about to be computed. Returns the explanation where it cost a block or more to miss."""
        ids = np.array(prompt, np.uint32)
        nearest = self._nearest(root, ids)
        verdict = _verdict(nearest, len(ids), cached_tokens, block_tokens)
        explanation = Explanation(rid, verdict, len(ids), cached_tokens, nearest)
        with self._lock:
            self._explained[rid] = explanation
            self._explained.move_to_end(rid)
            while len(self._explained) > EXPLANATIONS_KEPT:
                self._explained.popitem(last=False)
        self.remember(rid, root, ids)
        return explanation if verdict is Verdict.GONE or _lost_a_block(explanation, block_tokens) else None

    def remember(self, rid: str, root: bytes, tokens: Sequence[int] | Ids) -> None:
        """A prompt, or prompt and answer once it is there: the next turn goes on from both."""
        ids = np.array(tokens, np.uint32)
        self._forget(rid)
        for other, (its_root, its_ids) in list(self._prompts.items()):
            if its_root == root and _shared(its_ids, ids) == len(its_ids):
                self._forget(other)  # the new one says all of it
        self._prompts[rid] = (root, ids)
        self._tokens += len(ids)
        while len(self._prompts) > PROMPTS_KEPT or (self._tokens > TOKENS_KEPT and len(self._prompts) > 1):
            self._forget(next(iter(self._prompts)))

    def of(self, request_id: str) -> list[Explanation]:
        """Of all prompts of one request: their ids begin with its own. Any thread."""
        with self._lock:
            return [e for rid, e in self._explained.items() if rid == request_id or rid.startswith(f"{request_id}.")]

    def _forget(self, rid: str) -> None:
        if rid in self._prompts:
            self._tokens -= len(self._prompts.pop(rid)[1])

    def _nearest(self, root: bytes, ids: Ids) -> Parting | None:
        """The longest common beginning; among equal ones the latest."""
        best: tuple[int, str, Ids] | None = None
        for rid, (its_root, its_ids) in self._prompts.items():
            shared = _shared(its_ids, ids) if its_root == root else 0
            if shared and (best is None or shared >= best[0]):
                best = shared, rid, its_ids
        return None if best is None else _parting(best[1], best[2], ids, best[0])


def _parting(rid: str, theirs: Ids, ours: Ids, shared: int) -> Parting:
    def excerpt(ids: Ids, start: int, end: int) -> tuple[int, ...]:
        return tuple(ids[max(0, start) : end].tolist())

    return Parting(
        rid=rid,
        tokens=len(theirs),
        shared_tokens=shared,
        again_at=_again(ours, theirs, shared),
        before=excerpt(ours, shared - EXCERPT_TOKENS, shared),
        here=excerpt(ours, shared, shared + EXCERPT_TOKENS),
        there=excerpt(theirs, shared, shared + EXCERPT_TOKENS),
    )


def _verdict(nearest: Parting | None, prompt_tokens: int, cached_tokens: int, block_tokens: int) -> Verdict:
    last = prompt_tokens - 1
    if last - cached_tokens < block_tokens:
        return Verdict.WHOLE
    if nearest is None:
        return Verdict.NEW
    if min(nearest.shared_tokens, last) // block_tokens * block_tokens > cached_tokens:
        return Verdict.GONE
    if nearest.shared_tokens == nearest.tokens:
        return Verdict.GREW
    return Verdict.PARTED if nearest.shared_tokens >= block_tokens or nearest.again_at is not None else Verdict.NEW


def _lost_a_block(explanation: Explanation, block_tokens: int) -> bool:
    """Parting from an earlier prompt just before its end loses nothing."""
    near = explanation.nearest
    return explanation.verdict is Verdict.PARTED and near is not None and near.tokens - near.shared_tokens >= block_tokens


def _shared(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _again(ours: Ids, theirs: Ids, start: int) -> tuple[int, int] | None:
    """The first place found where both go on with the same text; something was put in, left out or changed before it."""
    for skipped in (1, 4, 16, 64, 256):
        at = start + skipped
        needle = theirs[at : at + AGREE_TOKENS]
        if len(needle) < AGREE_TOKENS:
            return None
        found = np.arange(start, len(ours) - AGREE_TOKENS + 1)
        for offset, token in enumerate(needle):  # not place by place: a prompt may be one token a hundred thousand times
            found = found[ours[found + offset] == token]
        if len(found):
            here, back = int(found[0]), 0
            while back < skipped and here - back > start and ours[here - back - 1] == theirs[at - back - 1]:
                back += 1
            return here - back, at - back
    return None
