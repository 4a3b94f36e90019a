"""What the engine thread does: takes commands, admits sequences in order, steps the lanes, sends rows.

Owns every sequence from its arrival to its last row. One sequence at a time is prefilled, the others of its lane decode
meanwhile; admission waits for that, so that a prompt finds the blocks of the one before it. Lives on the engine thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import mlx.core as mx

from supervisor.protocol import Code, Grant, Row, Trim
from worker.blas import set_blas_threads
from worker.controls import Controls
from worker.explain import PromptMemory
from worker.faults import EXIT_FAILED, FAULTS_IN_A_ROW, BadJob, code_of
from worker.job import EngineBeat, Job, Sink, Text
from worker.lanes import Lane
from worker.line import Line
from worker.loader import LoadedModel
from worker.mailbox import Cancel, Command, Halt, Probe, Warmed
from worker.memory import limit_memory
from worker.meter import Meter
from worker.prefix import PrefixCache
from worker.restore import Restore, Restored
from worker.sampling import check
from worker.scoring import Scored, Scoring
from worker.sequence import Sequence, Stage
from worker.serial_lane import SerialLane

_log = logging.getLogger(__name__)
PUBLISH_EVERY_S = 0.5
RESTORE_SLICE_S = 0.05
"""How long restoring may hold up the streams that decode, per step."""


class Scheduler:
    def __init__(
        self,
        loaded: LoadedModel,
        prefix: PrefixCache | None,
        text: Text,
        sink: Sink,
        meter: Meter,
        new_lane: Callable[[], Lane | SerialLane],
    ) -> None:
        self.halted = False
        self.prefix = prefix
        self.memory = PromptMemory()
        self._loaded = loaded
        self._text = text
        self._sink = sink
        self._meter = meter
        self._new_lane = new_lane
        self._lanes: dict[Lane | SerialLane, dict[int, Sequence]] = {new_lane(): {}}
        self._waiting = Line()
        self._restoring: tuple[Sequence, Restore | Scoring] | None = None
        self._faults_in_a_row = 0
        self._published_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._restoring is not None or any(self._lanes.values())

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
            case Warmed(blocks):
                if self.prefix is not None:
                    self.prefix.hot.fill(blocks)
            case Trim(level=level, target_bytes=target_bytes):
                if self.prefix is not None:
                    self.prefix.hot.free(target_bytes if level == "soft" else self.prefix.hot.bytes)
                mx.clear_cache()
        if not self.has_work:  # no step will follow that would say so
            self._publish()

    def step(self) -> None:
        """One round: at most one decode step and one prefill chunk per lane."""
        self._meter.begin(time.monotonic())
        self._admit()
        self._restore()
        rows = [row for lane in list(self._lanes) if lane.rows for row in self._advance(lane)]
        if rows:
            self._sink.rows(rows)
        self._meter.end()
        self._publish()

    # ------------------------------------------------------------------ arrivals and departures

    def _accept(self, job: Job) -> None:
        try:
            self._check(job)
        except BadJob as e:
            self._sink.error(job.rid, Code.BAD_REQUEST, str(e))
            return
        position = len(self._waiting)
        for choice in range(job.sampling.n or 1):
            chain = None if self.prefix is None or job.scores_prompt else self.prefix.new_chain(job.cache_salt)
            sequence = Sequence(job, choice, self._text.stream(job.prompt, job.stops), self._text.eos_ids, chain)
            self._waiting.join(sequence)
        self._sink.accepted(job.rid, *self._probe(job), position)

    def _check(self, job: Job) -> None:
        if not job.prompt or job.max_tokens < 1:
            raise BadJob("The prompt must not be empty, and max_tokens must be at least 1.")
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
        if self.prefix is None:
            return
        if grant.hot_bytes is not None:
            self.prefix.hot.resize(grant.hot_bytes)
        if grant.write_credit is not None and self.prefix.spill is not None:
            self.prefix.spill.add_credit(grant.write_credit)

    def _cancel(self, rid: str) -> None:
        now = time.monotonic()
        rows = [sequence.cancelled(now) for sequence in self._drop({rid})]
        if rows:
            self._sink.rows(rows)

    def _drop(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out of the queue and the lanes, and returns them."""
        dropped = self._waiting.leave(rids)
        if self._restoring is not None and self._restoring[0].job.rid in rids:
            dropped.append(self._restoring[0])
            self._restoring = None
        for lane, live in self._lanes.items():
            uids = [uid for uid, sequence in live.items() if sequence.job.rid in rids]
            dropped += [live.pop(uid) for uid in uids]
            if uids:
                lane.remove(uids)
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
        yield from self._waiting
        if self._restoring is not None:
            yield self._restoring[0]
        for live in self._lanes.values():
            yield from live.values()

    # ------------------------------------------------------------------ one round

    def _free_lane(self) -> Lane | SerialLane | None:
        return next((lane for lane in self._lanes if lane.has_room and not lane.is_prefilling), None)

    def _admit(self) -> None:
        """Takes the next one out of the queue as soon as a lane could prefill it."""
        if not self._waiting or self._restoring is not None or (lane := self._free_lane()) is None:
            return
        sequence = self._waiting.next()
        sequence.restoring(time.monotonic())
        if sequence.job.scores_prompt:
            self._restoring = (sequence, self._scoring(sequence.job, lane))
        elif self.prefix is None or sequence.chain is None:
            self._prefill(lane, sequence, Restored())
        else:
            self._restoring = (sequence, Restore(self.prefix, sequence.chain, sequence.job.prompt))

    def _restore(self) -> None:
        if self._restoring is None or (lane := self._free_lane()) is None:
            return
        sequence, restore = self._restoring
        try:
            restored = restore.advance(time.monotonic() + RESTORE_SLICE_S)
        except Exception as e:  # whatever is wrong with the cache, the request can do without it; not so without its scores
            _log.exception("restoring or scoring a prefix failed")
            if isinstance(restore, Scoring):
                self._drop({sequence.job.rid})
                self._sink.error(sequence.job.rid, code_of(e), f"The model failed while scoring the prompt: {e}")
                return
            restored = Restored()
        if isinstance(restore, Scoring):
            self._meter.advance(1)
            sequence.prompt_logprobs = restore.entries
        if restored is not None:
            self._restoring = None
            self._prefill(lane, sequence, restored)

    def _scoring(self, job: Job, lane: Lane | SerialLane) -> Scoring:
        loaded = self._loaded
        chunk_tokens = lane.chunks.busy_tokens
        return Scoring(loaded.model, loaded.new_cache(), job.prompt, job.logprobs or 0, loaded.vocab_size, chunk_tokens)

    def _prefill(self, lane: Lane | SerialLane, sequence: Sequence, restored: Restored | Scored) -> None:
        job = sequence.job
        sequence.watch = controls = Controls(job, sequence.choice, self._loaded.vocab_size, self._text.eos_ids)
        cache = self._loaded.new_cache() if restored.cache is None else restored.cache
        edge = 0 if sequence.chain is None else sequence.chain.branch_tokens
        uid = lane.insert(job.prompt, restored.tokens, cache, controls.sampler, controls.processors, edge)
        self._lanes[lane][uid] = sequence
        sequence.prefilling(time.monotonic(), restored.hot_tokens, restored.cold_tokens)
        if self.prefix is not None and sequence.chain is not None:
            missed = self.memory.note(job.rid, sequence.chain.root, job.prompt, restored.tokens, self.prefix.block_tokens)
            if missed is not None:
                _log.info("cache miss: %s", missed.summary())

    def _advance(self, lane: Lane | SerialLane) -> list[Row]:
        live = self._lanes[lane]
        try:
            produced = lane.step()
            now = time.monotonic()
            rows = [live[uid].take(token, now) for uid, token in produced]
            self._look_at_cache(lane)
        except Exception as e:  # the batch is undefined now: its requests end, the worker goes on with a new generator
            self._rebuild(lane, e)
            return []
        self._faults_in_a_row = 0
        done = [uid for uid, _ in produced if live[uid].stage is Stage.DONE]
        if done:
            lane.remove(done)
            self._leave([live.pop(uid) for uid in done])
        return rows

    def _look_at_cache(self, lane: Lane | SerialLane) -> None:
        """Counts what the step added to the cache and copies completed blocks out, before another step moves them."""
        for held in lane.held():
            sequence = self._lanes[lane][held.uid]
            self._meter.advance(held.tokens - sequence.held_tokens)
            sequence.held_tokens = held.tokens
            if self.prefix is not None and sequence.chain is not None:
                self.prefix.capture(sequence.chain, held, sequence.tokens, len(sequence.job.prompt))

    def _rebuild(self, lane: Lane | SerialLane, error: Exception) -> None:
        _log.exception("a step failed")
        failed = list(self._lanes.pop(lane).values())
        rids = {sequence.job.rid for sequence in failed}
        self._leave(failed)
        self._drop(rids)
        lane.close()
        for rid in sorted(rids):
            self._sink.error(rid, code_of(error), f"The model failed while answering: {error}")
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= FAULTS_IN_A_ROW:
            self._end_all(Code.MODEL_FAILED, "The model keeps failing.")
            self._sink.failed(Code.MODEL_FAILED, f"{FAULTS_IN_A_ROW} steps in a row failed, last: {error}", EXIT_FAILED)
            self.halted = True
            return
        mx.clear_cache()
        self._lanes[self._new_lane()] = {}

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at < PUBLISH_EVERY_S and self.has_work:
            return
        self._published_at = now
        live = [sequence for lane in self._lanes.values() for sequence in lane.values()]
        lease_tokens = Counter[str]()
        for sequence in live:
            lease_tokens[sequence.job.lease] += sequence.held_tokens
        prefix = self.prefix
        self._meter.publish(
            EngineBeat(
                running=len(live),
                waiting=len(self._waiting) + (self._restoring is not None),
                mx_active_bytes=mx.get_active_memory(),
                mx_cache_bytes=mx.get_cache_memory(),
                mx_peak_bytes=mx.get_peak_memory(),
                kv_bytes=sum(lane.cache_bytes for lane in self._lanes),
                hot_bytes=0 if prefix is None else prefix.hot.bytes,
                store_written_bytes=0 if prefix is None or prefix.spill is None else prefix.spill.written_bytes,
                cache={} if prefix is None else prefix.counters(),
                lease_tokens=dict(lease_tokens),
            )
        )
