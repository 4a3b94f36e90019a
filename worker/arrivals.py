"""From the queue into a lane: who is next, whether there is memory, and the restore or scoring that comes before a prefill.

The first in line goes first. Others pass it only where that costs it little: while a long prompt is prefilled, one that is much
shorter may be, too; and whoever shares a beginning with a prompt under way waits until that part is in the cache.
Lives on the engine thread, between two rounds; must not know rows or sockets.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from worker.admission import Admission, Claim
from worker.appetite import Appetite
from worker.controls import Controls
from worker.explain import PromptMemory
from worker.job import Job
from worker.lane_set import LaneSet
from worker.line import Line
from worker.loader import LoadedModel
from worker.prefix import PrefixCache
from worker.restore import Restore, Restored
from worker.scoring import Scored, Scoring
from worker.sequence import Sequence
from worker.sharing import shared_blocks, waits_for

_log = logging.getLogger(__name__)
RESTORE_SLICE_S = 0.05
"""How long restoring may hold up the streams that decode, per step."""
MUCH_SHORTER = 0.5
"""Of what is left of the prompt being prefilled."""


class ScoringFailed(Exception):
    """A request cannot do without the scores that it asked for."""

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(f"The model failed while scoring the prompt: {error}")
        self.sequence = sequence
        self.error = error


class Arrivals:
    def __init__(
        self,
        loaded: LoadedModel,
        prefix: PrefixCache | None,
        eos_ids: frozenset[int],
        lanes: LaneSet,
        admission: Admission,
        appetite: Appetite,
    ) -> None:
        self.memory = PromptMemory()
        self.resumes = 0
        self._loaded = loaded
        self._prefix = prefix
        self._eos_ids = eos_ids
        self._lanes = lanes
        self._admission = admission
        self._appetite = appetite
        self._line = Line()
        self._restoring: tuple[Sequence, Restore | Scoring] | None = None
        self._blocked: Sequence | None = None

    def __len__(self) -> int:
        return len(self._line) + (self._restoring is not None)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._line
        if self._restoring is not None:
            yield self._restoring[0]

    @property
    def blocked(self) -> Sequence | None:
        """The next in line, where it waits for nothing but memory or room."""
        return self._blocked if self._lanes.has_room else next(iter(self._line), None)

    @property
    def parked(self) -> int:
        return sum(sequence.parks > 0 for sequence in self._line)

    def check(self, job: Job) -> None:
        """Raises KvTooLarge."""
        self._admission.check(Claim(len(job.prompt), job.max_tokens))

    def join(self, sequence: Sequence) -> None:
        self._line.join(sequence, time.monotonic())

    def rejoin(self, sequences: Iterable[Sequence]) -> None:
        """They were in a lane and will go on later."""
        for sequence in sequences:
            sequence.parked()
            self._line.rejoin(sequence)

    def put_back(self, *, scored_too: bool) -> bool:
        """Whoever is being restored waits again, and what was read for it is let go; whether somebody was put back.

        What was scored would have to be scored again: that goes only where nothing may stay.
        """
        if self._restoring is None or not (scored_too or self.is_restoring):
            return False
        sequence, _ = self._restoring
        self._restoring = None
        sequence.put_back()
        self._line.rejoin(sequence)
        return True

    def leave(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out."""
        gone = self._line.leave(rids)
        if self._restoring is not None and self._restoring[0].job.rid in rids:
            gone.append(self._restoring[0])
            self._restoring = None
        if self._blocked in gone:
            self._blocked = None
        return gone

    @property
    def is_restoring(self) -> bool:
        return self._restoring is not None and isinstance(self._restoring[1], Restore)

    def advance(self, may_score: Callable[[], bool]) -> int:
        """Takes the next one out of the line if it is time, and goes on with a restore. Returns how many chunks were scored.

        Raises ScoringFailed; that sequence is still to be taken out.
        """
        if self._restoring is None and (sequence := self._next()) is not None:
            self._begin(sequence)
        if self._restoring is None or (isinstance(self._restoring[1], Scoring) and not may_score()):
            return 0
        return self._go_on(*self._restoring)

    # ------------------------------------------------------------------ who is next

    def _next(self) -> Sequence | None:
        self._blocked = None
        if not self._line or not self._lanes.has_room:
            return None
        busy = [sequence for _, sequence in self._lanes.prefilling()]
        if len(busy) >= self._lanes.max_prefills:
            return None
        for sequence in self._line:
            if any(self._must_follow(sequence, other) for other in busy):
                continue
            if not self._has_memory(sequence) or self._lanes.place(sequence) is None:
                self._blocked = sequence
                return None  # nobody passes: what others would take is what this one waits for
            self._line.take(sequence, time.monotonic())
            return sequence
        return None

    def _must_follow(self, sequence: Sequence, other: Sequence) -> bool:
        """While `other` is being prefilled."""
        has_state = self._prefix is not None and self._prefix.layout.has_state
        if waits_for(sequence, other, has_state=has_state):
            return True
        if sequence.job.priority != other.job.priority:
            return sequence.job.priority < other.job.priority
        return self._uncached(sequence, other) > MUCH_SHORTER * (len(other.tokens) - other.held_tokens)

    def _uncached(self, sequence: Sequence, other: Sequence) -> int:
        """At most so many tokens are to be computed, all that it shares with `other` being in the cache."""
        shared = 0 if self._prefix is None else shared_blocks(sequence, other) * self._prefix.block_tokens
        return len(sequence.tokens) - max(shared, sequence.found_tokens)

    def _has_memory(self, sequence: Sequence) -> bool:
        if self._admission.is_shut:
            return False
        others = self._lanes.sequences()
        claims = [claim(other) for other in (*others, sequence)]
        if self._admission.fits(claims):
            return True
        if self._admission.pressed_bytes is None:
            self._appetite.ask(self._admission.needed_bytes(claims), time.monotonic())
        return not others  # the only one waits for nothing: what could never fit was refused at the door

    # ------------------------------------------------------------------ on the way

    def _begin(self, sequence: Sequence) -> None:
        now = time.monotonic()
        sequence.restoring(now)
        if sequence.job.scores_prompt and not sequence.parks:
            sequence.prefilling(now, 0, 0)  # nothing is brought back: all of its prompt is computed
            self._restoring = (sequence, self._scoring(sequence.job))
        elif self._prefix is None or sequence.chain is None:
            self._insert(sequence, Restored())
        else:
            self._restoring = (sequence, Restore(self._prefix, sequence.chain, sequence.tokens))

    def _go_on(self, sequence: Sequence, work: Restore | Scoring) -> int:
        try:
            outcome = work.advance(time.monotonic() + RESTORE_SLICE_S)
        except Exception as e:  # whatever is wrong with the cache, the request can do without it; not so without its scores
            _log.exception("restoring or scoring a prefix failed")
            if isinstance(work, Scoring):
                raise ScoringFailed(sequence, e) from e
            outcome = Restored()
        if isinstance(work, Scoring):
            sequence.prompt_logprobs = work.entries
        if outcome is not None:
            self._restoring = None
            self._insert(sequence, outcome)
        return int(isinstance(work, Scoring))

    def _scoring(self, job: Job) -> Scoring:
        loaded = self._loaded
        chunk_tokens = max(1, self._lanes.chunks.busy_tokens // 2)  # another prompt may be prefilled in the same round
        return Scoring(
            loaded.model, loaded.new_cache(), job.prompt, job.logprobs or 0, loaded.vocab_size, chunk_tokens, loaded.quantizing
        )

    def _insert(self, sequence: Sequence, restored: Restored | Scored) -> None:
        job = sequence.job
        controls = Controls(job, sequence.choice, self._loaded.vocab_size, self._eos_ids, generated_tokens=sequence.generated)
        sequence.watch = controls
        cache = self._loaded.new_cache() if restored.cache is None else restored.cache
        edge = 0 if sequence.chain is None else sequence.chain.branch_tokens
        self._lanes.insert(sequence, restored.tokens, cache, controls, edge)
        sequence.prefilling(time.monotonic(), restored.hot_tokens, restored.cold_tokens)
        if sequence.parks:
            self.resumes += 1
            again = len(sequence.tokens) - restored.tokens
            _log.info("%s/%d goes on at token %d, %d computed again", job.rid, sequence.choice, len(sequence.tokens), again)
        elif self._prefix is not None and sequence.chain is not None:
            block_tokens = self._prefix.block_tokens
            missed = self.memory.note(job.rid, sequence.chain.root, job.prompt, restored.tokens, block_tokens)
            if missed is not None:
                _log.info("cache miss: %s", missed.summary())


def claim(sequence: Sequence) -> Claim:
    said_tokens = sequence.begun_tokens - len(sequence.job.prompt)
    return Claim(sequence.begun_tokens, sequence.job.max_tokens - said_tokens, len(sequence.tokens))
