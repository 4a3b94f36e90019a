"""One answer being made: from a queued prompt to its last row.

Decides when it ends and what its rows say; counts and times itself. Pure: token in, row out, `now` handed in.
Must not know MLX, batches or sockets.
"""

from enum import StrEnum
from typing import Protocol

from supervisor.protocol import FinishReason, Piece, Row, Timings, Usage
from worker.chain import Chain
from worker.job import Job, TextStream


class Stage(StrEnum):
    WAITING = "waiting"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


class Watch(Protocol):
    """`worker.controls.Controls` as a sequence uses it."""

    @property
    def trouble(self) -> str | None: ...

    def logprobs(self, position: int, token: int) -> list[dict[str, object]] | None: ...


class DraftCounts(Protocol):
    """`worker.drafting.Counts` as a sequence uses it."""

    @property
    def proposed(self) -> int: ...

    @property
    def accepted(self) -> int: ...


class Sequence:
    def __init__(self, job: Job, choice: int, stream: TextStream, eos_ids: frozenset[int], chain: Chain | None) -> None:
        self.job = job
        self.choice = choice
        self.stage = Stage.WAITING
        self.tokens = list(job.prompt)
        """Prompt and answer: what the cache holds or will hold."""
        self.chain = chain
        """None where the prefix cache is off."""
        self.held_tokens = 0
        """What the lane's cache holds of it, as last seen."""
        self.found_tokens = 0
        """What the prefix cache seemed to hold of the prompt when it came."""
        self.cached_hot = 0
        self.cached_cold = 0
        self.watch: Watch | None = None
        self.draft_counts: DraftCounts | None = None
        """Where a draft model helps."""
        self.rank: tuple[float, int] = (0.0, 0)
        """Its place in any line, given when it came: the smaller one goes first."""
        self.taken_at = 0.0
        """When it last left the line."""
        self.parks = 0
        """How often it was put aside."""
        self.begun_tokens = len(job.prompt)
        """How long it was when it last began: its prompt, or all it had when it was put aside."""
        self.prompt_logprobs: list[dict[str, object]] = []
        """Said with the first row."""
        self._drafted_before: tuple[int, int] | None = None
        """Proposed and accepted before it was put aside."""
        self._stream = stream
        self._eos_ids = eos_ids
        self._ignore_eos = bool(job.sampling.ignore_eos)
        self._rows_sent = 0
        self._restore_at: float | None = None
        self._prefill_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.job.prompt)

    @property
    def said_tokens(self) -> int:
        """Where an echo alone is asked for, the one token that its last step yields is no part of the answer."""
        return min(self.generated, self.job.max_tokens)

    def restoring(self, now: float) -> None:
        self.stage = Stage.RESTORING
        if self._restore_at is None:
            self._restore_at = now

    def prefilling(self, now: float, cached_hot: int, cached_cold: int) -> None:
        """What it finds of itself after it was put aside is not what the cache had of its prompt."""
        self.stage = Stage.PREFILLING
        if self._prefill_at is None:
            self._prefill_at, self.cached_hot, self.cached_cold = now, cached_hot, cached_cold

    def put_back(self) -> None:
        """It waits again, before it came into a lane."""
        self.stage = Stage.WAITING

    def parked(self) -> None:
        """It is out of its lane and goes on later from `tokens`; what it has said stays said."""
        self.stage = Stage.WAITING
        self.parks += 1
        self.begun_tokens = len(self.tokens)
        self.held_tokens = 0
        self.watch = None
        if self.chain is not None:
            self.chain.forget_kept()
        self._drafted_before, self.draft_counts = self._drafted(), None

    def take(self, token: int, now: float) -> Row:
        """The row that this token makes; `stage` is DONE after the last one."""
        logprobs = None if self.watch is None else self.watch.logprobs(len(self.tokens), token)
        text = ""
        self.stage = Stage.DECODING
        is_first = self._first_token_at is None
        if is_first:
            self._first_token_at = now
            text = self.job.echo or ""
            logprobs = logprobs if logprobs is None else [*self.prompt_logprobs, *logprobs]
        self.tokens.append(token)
        is_end = token in self._eos_ids
        if self.watch is not None and self.watch.trouble is not None:
            return self._last_row("error", text, now)
        if not self.job.max_tokens:
            return self._last_row("length", text, now, logprobs=self.prompt_logprobs or None)
        if is_end and not self._ignore_eos:
            return self._last_row("stop", text + self._stream.close(), now, logprobs=logprobs)
        text += "" if is_end else self._stream.push(token)
        if self._stream.stopped_by is not None:
            return self._last_row("stop", text, now, self._stream.stopped_by, logprobs)
        if self.generated >= self.job.max_tokens:
            return self._last_row("length", text + self._stream.close(), now, logprobs=logprobs)
        return self._row(text, logprobs=logprobs, timings=self._timings(now) if is_first else None)

    def cancelled(self, now: float) -> Row:
        return self._last_row("cancelled", "", now)

    def _last_row(
        self,
        finish: FinishReason,
        text: str,
        now: float,
        stop_string: str | None = None,
        logprobs: list[dict[str, object]] | None = None,
    ) -> Row:
        self.stage = Stage.DONE
        usage = Usage(
            prompt_tokens=len(self.job.prompt),
            completion_tokens=self.said_tokens,
            cached_hot=self.cached_hot,
            cached_cold=self.cached_cold,
        )
        return self._row(text, finish, stop_string, usage, self._timings(now), logprobs)

    def _row(
        self,
        text: str,
        finish: FinishReason | None = None,
        stop_string: str | None = None,
        usage: Usage | None = None,
        timings: Timings | None = None,
        logprobs: list[dict[str, object]] | None = None,
    ) -> Row:
        row = Row(
            rid=self.job.rid,
            choice=self.choice,
            seq=self._rows_sent,
            tokens=self.said_tokens,
            pieces=[Piece(text=text)] if text else [],
            logprobs=logprobs,
            finish=finish,
            stop_string=stop_string,
            usage=usage,
            timings=timings,
        )
        self._rows_sent += 1
        return row

    def _drafted(self) -> tuple[int, int] | None:
        if self.draft_counts is None:
            return self._drafted_before
        proposed, accepted = self._drafted_before or (0, 0)
        return proposed + self.draft_counts.proposed, accepted + self.draft_counts.accepted

    def _timings(self, now: float) -> Timings:
        proposed, accepted = self._drafted() or (None, None)
        submitted_at = self.job.submitted_at
        prepared_at = submitted_at if self.job.prepared_at is None else self.job.prepared_at
        restore_at = now if self._restore_at is None else self._restore_at
        prefill_at = now if self._prefill_at is None else self._prefill_at
        first_at = now if self._first_token_at is None else self._first_token_at
        return Timings(
            prepare_s=prepared_at - submitted_at,
            queued_s=restore_at - prepared_at,
            restore_s=prefill_at - restore_at,
            prefill_s=first_at - prefill_at,
            first_token_s=first_at - submitted_at,
            decode_s=now - first_at,
            draft_proposed=proposed,
            draft_accepted=accepted,
            parks=self.parks,
        )
