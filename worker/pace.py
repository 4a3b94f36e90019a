"""How many prompt tokens the next round may take, from how long rounds took.

Two rules pull: a stream that runs should not wait longer than the target between two tokens, and a prompt must get on although
others decode. Where the machine is too slow for both, the prompt's share wins: a gap is bounded by it all the same.
Pure: durations in, a chunk out.
"""

from worker.lanes import Chunks

LEAST_TOKENS = 16
"""Smaller chunks cost nearly as much as these."""
PREFILL_SHARE = 4.0
"""A chunk may take this many times as long as the decode step beside it. A prompt then needs 1.25 times what it needs alone,
and some more, as small chunks cost more per token: with 2.5 that came to 1.6 on a CPU, with this to 1.2."""
NEW_WEIGHT = 0.3
"""How much one round moves what is believed."""


class Pace:
    def __init__(self, chunks: Chunks, max_gap_s: float) -> None:
        self._idle_tokens = chunks.idle_tokens
        self._sizes = sizes_of(chunks)
        self._max_gap_s = max_gap_s
        self._decode_s = 0.0
        self._token_s: float | None = None

    def chunk_tokens(self, *, someone_decodes: bool) -> int:
        """For one round, all lanes together."""
        if not someone_decodes:
            return self._idle_tokens
        if self._token_s is None:
            return self._sizes[-1]
        by_gap = (self._max_gap_s - self._decode_s) / self._token_s
        by_share = PREFILL_SHARE * self._decode_s / self._token_s
        in_time = max((size for size in self._sizes if size <= by_gap), default=self._sizes[0])
        fair = min((size for size in self._sizes if size >= by_share), default=self._sizes[-1])
        return max(in_time, fair)

    def note(self, *, decoded: bool, prefill_tokens: int, took_s: float) -> None:
        """What a round did and how long it took, decode step and chunks together: they run on one queue of the device."""
        if prefill_tokens:
            rest_s = max(took_s - (self._decode_s if decoded else 0.0), took_s / 10)
            self._token_s = _moved(self._token_s, rest_s / prefill_tokens)
        elif decoded:
            self._decode_s = _moved(self._decode_s or None, took_s)


def sizes_of(chunks: Chunks) -> tuple[int, ...]:
    """Ascending, up to the busy size: multiples or divisors of a block, so that every chunk's edge suits its blocks."""
    sizes = [chunks.busy_tokens]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= LEAST_TOKENS:
        half = sizes[-1] // 2
        if half % chunks.block_tokens and chunks.block_tokens % half:
            break
        sizes.append(half)
    return tuple(reversed(sizes))


def _moved(old: float | None, new: float) -> float:
    return new if old is None else old + NEW_WEIGHT * (new - old)
