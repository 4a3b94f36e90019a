"""What the engine thread does: takes commands, admits sequences in order, steps the lanes, sends rows.

Owns every sequence from its arrival to its last row. One sequence at a time is prefilled, the others of its lane decode
meanwhile; admission waits for that, so that a prompt finds the blocks of the one before it. Lives on the engine thread.
"""

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterator

from supervisor.protocol import Code, Row
from worker.faults import EXIT_FAILED, FAULTS_IN_A_ROW, BadJob, code_of
from worker.job import EngineBeat, Job, Sink, Text
from worker.lanes import Lane
from worker.loader import LoadedModel
from worker.mailbox import Cancel, Command, Halt
from worker.meter import Meter
from worker.sampling import check, processors_for, sampler_for
from worker.sequence import Sequence, Stage

_log = logging.getLogger(__name__)
PUBLISH_EVERY_S = 0.5


class Scheduler:
    def __init__(self, loaded: LoadedModel, text: Text, sink: Sink, meter: Meter, new_lane: Callable[[], Lane]) -> None:
        self.halted = False
        self._loaded = loaded
        self._text = text
        self._sink = sink
        self._meter = meter
        self._new_lane = new_lane
        self._lanes: dict[Lane, dict[int, Sequence]] = {new_lane(): {}}
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._faults_in_a_row = 0
        self._published_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(self._lanes.values())

    def handle(self, command: Command) -> None:
        match command:
            case Job():
                self._accept(command)
            case Cancel(rid):
                self._cancel(rid)
            case Halt():
                self._end_all(Code.SHUTTING_DOWN, "The server is shutting down.")
                self.halted = True
            case _:
                pass

    def step(self) -> None:
        """One round: at most one decode step and one prefill chunk per lane."""
        self._meter.begin(time.monotonic())
        self._admit()
        rows = [row for lane in list(self._lanes) if lane.rows for row in self._advance(lane)]
        if rows:
            self._sink.rows(rows)
        self._meter.end()
        self._publish()

    # ------------------------------------------------------------------ arrivals and departures

    def _accept(self, job: Job) -> None:
        try:
            if not job.prompt or job.max_tokens < 1:
                raise BadJob("The prompt must not be empty, and max_tokens must be at least 1.")
            check(job.sampling, self._loaded.vocab_size)
        except BadJob as e:
            self._sink.error(job.rid, Code.BAD_REQUEST, str(e))
            return
        position = len(self._waiting)
        for choice in range(job.sampling.n or 1):
            sequence = Sequence(job, choice, self._text.stream(job.prompt, job.stops), self._text.eos_ids)
            heapq.heappush(self._waiting, (-job.priority, next(self._arrivals), sequence))
        self._sink.accepted(job.rid, 0, 0, position)

    def _cancel(self, rid: str) -> None:
        now = time.monotonic()
        rows = [sequence.cancelled(now) for sequence in self._drop({rid})]
        if rows:
            self._sink.rows(rows)

    def _drop(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out of the queue and the lanes, and returns them."""
        dropped = [entry[2] for entry in self._waiting if entry[2].job.rid in rids]
        self._waiting = [entry for entry in self._waiting if entry[2].job.rid not in rids]
        heapq.heapify(self._waiting)
        for lane, live in self._lanes.items():
            uids = [uid for uid, sequence in live.items() if sequence.job.rid in rids]
            dropped += [live.pop(uid) for uid in uids]
            if uids:
                lane.remove(uids)
        return dropped

    def _end_all(self, code: Code, message: str) -> None:
        rids = {sequence.job.rid for sequence in self._sequences()}
        self._drop(rids)
        for rid in sorted(rids):
            self._sink.error(rid, code, message)

    def _sequences(self) -> Iterator[Sequence]:
        yield from (entry[2] for entry in self._waiting)
        for live in self._lanes.values():
            yield from live.values()

    # ------------------------------------------------------------------ one round

    def _admit(self) -> None:
        lane = next((lane for lane in self._lanes if lane.has_room and not lane.is_prefilling), None)
        if lane is None or not self._waiting:
            return
        sequence = heapq.heappop(self._waiting)[2]
        now = time.monotonic()
        sequence.restoring(now)
        self._prefill(lane, sequence)

    def _prefill(self, lane: Lane, sequence: Sequence) -> None:
        job = sequence.job
        sampler = sampler_for(job.sampling, sequence.choice)
        processors = processors_for(job.sampling, len(job.prompt), self._loaded.vocab_size, self._text.eos_ids)
        uid = lane.insert(job.prompt, 0, self._loaded.new_cache(), sampler, processors)
        self._lanes[lane][uid] = sequence
        sequence.prefilling(time.monotonic(), 0, 0)

    def _advance(self, lane: Lane) -> list[Row]:
        live = self._lanes[lane]
        try:
            produced = lane.step()
        except Exception as e:  # the batch is undefined now: its requests end, the worker goes on with a new generator
            self._rebuild(lane, e)
            return []
        self._faults_in_a_row = 0
        now = time.monotonic()
        rows = [live[uid].take(token, now) for uid, token in produced]
        done = [uid for uid, _ in produced if live[uid].stage is Stage.DONE]
        if done:
            lane.remove(done)
            for uid in done:
                del live[uid]
        self._meter.advance(len(produced))
        return rows

    def _rebuild(self, lane: Lane, error: Exception) -> None:
        _log.exception("a step failed")
        rids = {sequence.job.rid for sequence in self._lanes.pop(lane).values()}
        self._drop(rids)
        lane.close()
        for rid in sorted(rids):
            self._sink.error(rid, code_of(error), f"The model failed while answering: {error}")
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= FAULTS_IN_A_ROW:
            self._end_all(Code.MODEL_FAILED, "The model keeps failing.")
            self._sink.failed(Code.MODEL_FAILED, f"{FAULTS_IN_A_ROW} steps in a row failed, last: {error}", EXIT_FAILED)
            self.halted = True
        self._lanes[self._new_lane()] = {}

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at < PUBLISH_EVERY_S and self.has_work:
            return
        self._published_at = now
        self._meter.publish(EngineBeat())
