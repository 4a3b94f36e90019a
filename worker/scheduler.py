"""What the engine thread does: takes commands, lets sequences into the lanes, steps the lanes, sends rows.

Owns every sequence from its arrival to its last row. A round is one decode step of every lane, whose rows go out at once, and
then as many prompt tokens as the pace allows. Lives on the engine thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import mlx.core as mx

from supervisor.protocol import Activity, Code, Grant, Row, Trim, Turn
from worker.admission import Admission, KvTooLarge
from worker.appetite import Appetite
from worker.arrivals import Arrivals, ScoringFailed
from worker.blas import set_blas_threads
from worker.faults import EXIT_FAILED, EXIT_GPU_FAULT, FAULTS_IN_A_ROW, BadJob, code_of, failure_of
from worker.job import EngineBeat, Job, Sink, Text
from worker.lane_set import AnyLane, LaneSet
from worker.loader import LoadedModel
from worker.mailbox import Cancel, Command, Halt, Probe, Warmed
from worker.memory import limit_memory
from worker.meter import Meter
from worker.pace import Pace
from worker.parking import Parking
from worker.prefix import PrefixCache
from worker.sampling import check
from worker.sequence import Sequence, Stage
from worker.serial_lane import SerialLane
from worker.turn import PrefillTurn

_log = logging.getLogger(__name__)
PUBLISH_EVERY_S = 0.5
SHUT_WAIT_S = 0.05
"""Between two looks while work waits and none may begin."""
TURN_WAIT_S = 1.0
"""Between two looks at memory while all work waits for a turn, of whose coming a message tells."""


class Scheduler:
    def __init__(
        self,
        loaded: LoadedModel,
        prefix: PrefixCache | None,
        text: Text,
        sink: Sink,
        meter: Meter,
        new_lane: Callable[[], AnyLane],
        admission: Admission,
        max_gap_s: float,
        loan_s: float,
        *,
        turns_leased: bool = False,
    ) -> None:
        self.halted = False
        self.prefix = prefix
        self._loaded = loaded
        self._text = text
        self._sink = sink
        self._meter = meter
        self._lanes = LaneSet(new_lane)
        self._pace = Pace(self._lanes.chunks, max_gap_s)
        self._admission = admission
        self._appetite = Appetite(admission, sink.want, loan_s)
        self._arrivals = Arrivals(loaded, prefix, text.eos_ids, self._lanes, admission, self._appetite)
        self._parking = Parking(self._lanes, self._arrivals, admission, self._appetite, self._park)
        self.memory = self._arrivals.memory
        self._turn = PrefillTurn(sink.tell, leased=turns_leased)
        self._neighbours_decoding = 0
        self._decoded = False
        self._faults_in_a_row = 0
        self._published_at = 0.0

    @property
    def has_work(self) -> bool:
        return len(self._arrivals) > 0 or self._lanes.rows > 0

    @property
    def patience_s(self) -> float | None:
        """How long the thread may sleep if no command comes; None for ever."""
        if self._turn.is_awaited and not self._lanes.decodes and not self._arrivals.is_restoring:
            return TURN_WAIT_S
        if self._lanes.rows or (self._arrivals and not self._admission.is_shut):
            return 0.0
        return SHUT_WAIT_S if self._arrivals else self._appetite.patience_s(time.monotonic())

    def handle(self, command: Command) -> None:
        match command:
            case Job():
                try:
                    self._accept(command)
                except Exception:  # one request's boundary: the others go on
                    _log.exception("request %s could not be taken", command.rid)
                    self._drop({command.rid})
                    self._sink.error(command.rid, Code.INTERNAL, "The model's worker could not take this request.")
            case Cancel(rid):
                self._cancel(rid)
            case Probe(job=job, answer=answer):
                answer(*self._probe(job))
            case Halt():
                self._end_all(Code.SHUTTING_DOWN, "The server is shutting down.")
                self.halted = True
            case Grant():
                self._grant(command)
            case Turn():
                self._turn.take(command)
            case Warmed(blocks):
                if self.prefix is not None:
                    self.prefix.hot.fill(blocks)
            case Trim():
                self._trim(command)

    def step(self) -> None:
        """One round, after whoever is next has been let in; without work, only a look at what is lent."""
        self._meter.begin(time.monotonic())
        try:
            self._meter.advance(self._arrivals.advance(self._has_turn))
        except ScoringFailed as e:
            self._drop({e.sequence.job.rid})
            self._sink.error(e.sequence.job.rid, code_of(e.error), str(e))
        if self._lanes.rows:
            self._round()
        self._tell_neighbours()
        self._look_at_memory()
        self._meter.end()
        self._publish()

    # ------------------------------------------------------------------ arrivals and departures

    def _accept(self, job: Job) -> None:
        try:
            self._check(job)
            self._arrivals.check(job)
        except (BadJob, KvTooLarge) as e:
            self._sink.error(job.rid, Code.KV_TOO_LARGE if isinstance(e, KvTooLarge) else Code.BAD_REQUEST, str(e))
            return
        position, found = len(self._arrivals), self._probe(job)
        for choice in range(job.sampling.n or 1):
            chain = None if self.prefix is None or job.scores_prompt else self.prefix.new_chain(job.cache_salt)
            sequence = Sequence(job, choice, self._text.stream(job.prompt, job.stops), self._text.eos_ids, chain)
            sequence.found_tokens = sum(found)
            self._arrivals.join(sequence)
        self._sink.accepted(job.rid, *found, position)

    def _check(self, job: Job) -> None:
        if not job.prompt or job.max_tokens < (1 if job.echo is None else 0):
            raise BadJob("The prompt must not be empty, and max_tokens must be at least 1, or 0 for an echo alone.")
        vocab_size = self._loaded.vocab_size
        if min(job.prompt) < 0 or max(job.prompt) >= vocab_size:  # MLX would read whatever lies beyond the table
            raise BadJob(f"The prompt holds token ids outside 0 to {vocab_size - 1}.")
        check(job.sampling, vocab_size)

    def _probe(self, job: Job) -> tuple[int, int]:
        if self.prefix is None or job.scores_prompt:
            return 0, 0
        return self.prefix.probe(self.prefix.new_chain(job.cache_salt), job.prompt)

    def _grant(self, grant: Grant) -> None:
        if grant.blas_threads is not None:
            set_blas_threads(grant.blas_threads)
        if grant.kv_bytes is not None:
            limit_memory(self._loaded.weights_bytes, grant.kv_bytes)
            now = time.monotonic()
            self._appetite.granted(grant.kv_bytes, now, more_soon=bool(grant.more_soon))
            self._parking.fit_grant(now)
        if grant.neighbours_decoding is not None:
            self._neighbours_decoding = grant.neighbours_decoding
        if self.prefix is None:
            return
        if grant.hot_bytes is not None:
            self.prefix.hot.resize(grant.hot_bytes)
        if grant.write_credit is not None and self.prefix.spill is not None:
            self.prefix.spill.add_credit(grant.write_credit)

    def _trim(self, trim: Trim) -> None:
        """Cached KV goes first, then that of running answers, which go on later; MLX's freed buffers always."""
        freed_bytes = 0
        if self.prefix is not None:
            freed_bytes = self.prefix.hot.bytes
            self.prefix.hot.free(trim.target_bytes if trim.level == "soft" else freed_bytes)
            freed_bytes -= self.prefix.hot.bytes
        if trim.level != "soft":
            # Without a number one answer each time: what is cached fills up again by itself.
            wanted_bytes = max(0, trim.target_bytes - freed_bytes) if trim.target_bytes else 1
            self._parking.press(wanted_bytes, time.monotonic(), is_critical=trim.level == "critical")
        mx.clear_cache()

    def _park(self, sequences: Collection[Sequence]) -> None:
        """Their blocks are in the cache already, but for a last state; the rest is computed again when they go on."""
        self._lanes.remove(sequences)
        self._leave(sequences)
        self._arrivals.rejoin(sequences)
        self._published_at = 0.0  # worth saying at once

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        self._parking.advance(now)
        if self._appetite.is_due(now) and self._appetite.settle(self._parking.needed_bytes(self._sequences()), now):
            mx.clear_cache()

    def _cancel(self, rid: str) -> None:
        now = time.monotonic()
        rows = [sequence.cancelled(now) for sequence in self._drop({rid})]
        if rows:
            self._sink.rows(rows)

    def _drop(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out of the queue and the lanes, and returns them."""
        dropped = [*self._arrivals.leave(rids), *self._lanes.leave(rids)]
        self._leave(dropped)
        return dropped

    def _leave(self, sequences: Iterable[Sequence]) -> None:
        """They are over: what the cache still holds back of them is kept."""
        for sequence in sequences:
            if self.prefix is not None and sequence.chain is not None:
                self.prefix.leave(sequence.chain)
                if sequence.held_tokens:
                    self.memory.remember(sequence.job.rid, sequence.chain.root, sequence.tokens[: sequence.held_tokens])

    def _end_all(self, code: Code, message: str) -> None:
        rids = {sequence.job.rid for sequence in self._sequences()}
        self._drop(rids)
        for rid in sorted(rids):
            self._sink.error(rid, code, message)

    def _sequences(self) -> Iterator[Sequence]:
        yield from self._arrivals
        yield from self._lanes.sequences()

    # ------------------------------------------------------------------ one round

    def _round(self) -> None:
        began_at = time.monotonic()
        self._lanes.merge()
        decoded = self._lanes.decodes
        chunk_tokens = self._pace.chunk_tokens(someone_decodes=decoded or self._neighbours_decoding > 0)
        rows = [row for lane in self._lanes for row in self._decode(lane)]
        if rows:
            self._sink.rows(rows)
        prefill_tokens = self._prefill(chunk_tokens) if self._lanes.prefilling() and self._has_turn() else 0
        self._pace.note(decoded=decoded, prefill_tokens=prefill_tokens, took_s=time.monotonic() - began_at)

    def _has_turn(self) -> bool:
        """Whether anything may be prefilled or scored now. Only asked when there is something."""
        priority = max((sequence.job.priority for sequence in self._sequences()), default=0)
        return self._turn.has(priority, time.monotonic())

    def _tell_neighbours(self) -> None:
        """Between two rounds: a turn that others wait for is passed on, and they may need smaller chunks, or no longer."""
        self._turn.settle()
        decodes = self._lanes.decodes
        if decodes is not self._decoded:
            self._decoded = decodes
            self._sink.tell(Activity(decoding=decodes))

    def _decode(self, lane: AnyLane) -> list[Row]:
        live = self._lanes.live(lane)
        try:
            produced = lane.decode()
            now = time.monotonic()
            counts = lane.own_counts if isinstance(lane, SerialLane) else None
            for sequence in live.values():
                sequence.draft_counts = counts
            # Of several tokens of one sequence, those after its last one are not part of the answer.
            rows = [live[uid].take(token, now) for uid, token in produced if live[uid].stage is not Stage.DONE]
            ended = list(dict.fromkeys(uid for uid, _ in produced if live[uid].stage is Stage.DONE))
            for uid in ended:
                lane.cut_back(uid, len(live[uid].tokens))
            self._look_at_cache(lane)
        except Exception as e:  # the batch is undefined now: its requests end, the worker goes on with a new generator
            self._rebuild(lane, e)
            return []
        if produced:
            self._faults_in_a_row = 0
        self._leave(self._lanes.take_out(lane, ended))
        return rows

    def _prefill(self, chunk_tokens: int) -> int:
        """Chunks of prompts, taking turns, until so many tokens are done or nothing more fits. Returns how many were."""
        done = 0
        while not self.halted:
            lanes = self._lanes.prefilling()
            turn = next((lane for lane, sequence in lanes if done + _cost(lane, sequence, chunk_tokens) <= chunk_tokens), None)
            if turn is None:
                break
            self._lanes.served(turn)
            try:
                done += turn.prefill(chunk_tokens)
                self._look_at_cache(turn)
            except Exception as e:  # as in a decode step
                self._rebuild(turn, e)
                break
            self._faults_in_a_row = 0
        _log.debug("prefilled %d tokens until %.3f", done, time.monotonic())
        return done

    def _look_at_cache(self, lane: AnyLane) -> None:
        """Counts what the step added to the cache and copies completed blocks out, before another step moves them."""
        for held in lane.held():
            sequence = self._lanes.live(lane)[held.uid]
            self._meter.advance(held.tokens - sequence.held_tokens)
            sequence.held_tokens = held.tokens
            if self.prefix is not None and sequence.chain is not None:
                self.prefix.capture(sequence.chain, held, sequence.tokens, sequence.begun_tokens)

    def _rebuild(self, lane: AnyLane, error: Exception) -> None:
        _log.exception("a step failed")
        if code_of(error) is Code.GPU_FAULT:  # no request hears of it from here: each may be run by the next worker
            self._sink.failed(Code.GPU_FAULT, f"the GPU failed: {error}", EXIT_GPU_FAULT)
            self.halted = True
            return
        failed = self._lanes.close(lane)
        rids = {sequence.job.rid for sequence in failed}
        self._leave(failed)
        self._drop(rids)
        for rid in sorted(rids):
            self._sink.error(rid, code_of(error), f"The model failed while answering: {error}")
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= FAULTS_IN_A_ROW:
            self._end_all(Code.MODEL_FAILED, "The model keeps failing.")
            self._sink.failed(failure_of(error), f"{FAULTS_IN_A_ROW} steps in a row failed, last: {error}", EXIT_FAILED)
            self.halted = True
            return
        mx.clear_cache()

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at < PUBLISH_EVERY_S and self.has_work:
            return
        self._published_at = now
        try:
            self._meter.publish(self._figures())
        except Exception:  # they are for those who look on: no request ends for their sake
            _log.exception("the engine's figures could not be told")

    def _figures(self) -> EngineBeat:
        live = self._lanes.sequences()
        lease_tokens = Counter[str]()
        for sequence in live:
            lease_tokens[sequence.job.lease] += sequence.held_tokens
        prefix = self.prefix
        return EngineBeat(
            running=len(live),
            waiting=len(self._arrivals),
            parked=self._arrivals.parked,
            parks=self._parking.parks,
            resumes=self._arrivals.resumes,
            mx_active_bytes=mx.get_active_memory(),
            mx_cache_bytes=mx.get_cache_memory(),
            mx_peak_bytes=mx.get_peak_memory(),
            kv_bytes=self._lanes.cache_bytes,
            hot_bytes=0 if prefix is None else prefix.hot.bytes,
            store_written_bytes=0 if prefix is None or prefix.spill is None else prefix.spill.written_bytes,
            cache={} if prefix is None else prefix.counters(),
            draft=self._lanes.draft_counts,
            lease_tokens=dict(lease_tokens),
            turns_passed_on=self._turn.passed_on,
        )


def _cost(lane: AnyLane, sequence: Sequence, chunk_tokens: int) -> int:
    """How many tokens its next chunk has, at most."""
    return min(lane.next_chunk(chunk_tokens), len(sequence.tokens) - sequence.held_tokens)
