"""Owner of every exchange, from its start to the worker's last row: leases from the supervisor, submits to the workers.

A handler that leaves only says so here: the lease is released when the worker has really stopped, so that the supervisor never
thinks a busy worker idle. Knows nothing of HTTP.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from gateway.control import Control
from gateway.errors import Failure
from gateway.exchange import Exchange, Stage
from gateway.feed import READY
from gateway.inbox import Inbox
from gateway.records import Record, Records
from gateway.request import GenerateRequest
from gateway.trace import Step
from gateway.workers import WorkerMessage, Workers
from supervisor.protocol import (
    OK,
    Accepted,
    Cancel,
    Code,
    Granted,
    Lost,
    ModelRef,
    Problem,
    Queued,
    Rejected,
    Result,
    Row,
    Rows,
    SlotStatus,
    Usage,
)

COUNT_LIMIT_S = 5.0
JOIN_LIMIT_S = 5.0
"""A worker that outlived the last gateway joins this one within two seconds; one that is dead is reported lost sooner."""
LAST_ROW_LIMIT_S = 30.0
"""After a cancel; one prefill chunk on a slow machine takes seconds."""
LOADING = ("spawning", "loading")
_STOPS_BEFORE_LOAD = frozenset({Code.CONTEXT_LENGTH_EXCEEDED, Code.TEMPLATE_ERROR})
_SHUTTING_DOWN = Failure(Code.SHUTTING_DOWN, "The server is shutting down.")


class Link:
    def __init__(self, control: Control, workers: Workers, records: Records) -> None:
        self._control = control
        self._records = records
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._exchanges: dict[str, Exchange] = {}
        self._closing = False
        workers.on_join = self._on_join
        workers.on_message = self._on_message

    @property
    def inflight(self) -> int:
        return len(self._exchanges)

    # ------------------------------------------------------------------ for handlers

    def start(self, record: Record, index: int, request: GenerateRequest, inbox: Inbox) -> Exchange:
        """Sets a request going; everything that becomes of it arrives in `inbox` until `leave`."""
        name = f"{record.id}.{index}"
        exchange = Exchange(name, index, request, inbox, self._loop.time(), record, record.answer(name))
        slot = self._control.feed.find(request.model)
        self._records.named(record, request.model if slot is None else slot.id)
        if self._closing:
            exchange.fail(_SHUTTING_DOWN)
            exchange.stage = Stage.DONE
            self._over(exchange, _SHUTTING_DOWN.code)
        elif slot is None or slot.state == READY or not self._count(exchange, slot):
            self._acquire(exchange)
        return exchange

    def leave(self, exchange: Exchange) -> None:
        """The handler is gone. Never waits."""
        if exchange.deaf or exchange.stage is Stage.DONE:
            return
        exchange.deaf = True
        exchange.trace.note(Code.CANCELLED)
        match exchange.stage:
            case Stage.COUNTING:
                self._cancel_count(exchange)
                self._drop(exchange)
                self._over(exchange, Code.CANCELLED)
            case Stage.ACQUIRING:
                self._control.abandon(exchange.rid)
                self._drop(exchange)
                self._over(exchange, Code.CANCELLED)
            case Stage.JOINING:
                self._end(exchange, Code.CANCELLED)
            case Stage.RUNNING:
                if exchange.granted is not None:
                    self._workers.send(exchange.granted.worker, Cancel(epoch=self._workers.epoch, rid=exchange.rid))
                self._after(LAST_ROW_LIMIT_S, exchange, lambda: self._end(exchange, "no_last_row"))

    def shut(self) -> None:
        """Every answer ends with `shutting_down`, and so does every request that still comes."""
        self._closing = True
        for exchange in list(self._exchanges.values()):
            exchange.fail(_SHUTTING_DOWN)
            self.leave(exchange)

    # ------------------------------------------------------------------ counting, for a model that is not loaded

    def _count(self, exchange: Exchange, slot: SlotStatus) -> bool:
        """Asks whether the prompt fits before a model is loaded for it; False if there is nobody to ask."""
        if self._workers.text_worker is None:
            return False
        model = ModelRef(id=slot.id, path=slot.path, context=slot.context, kind=slot.kind)
        submit = exchange.request.count(epoch=self._workers.epoch, rid=exchange.count_rid, model=model)
        if not self._workers.send(self._workers.text_worker, submit):
            return False
        self._exchanges[exchange.count_rid] = exchange
        self._enter(exchange, Step.COUNT)
        self._after(COUNT_LIMIT_S, exchange, lambda: self._count_took_too_long(exchange))
        return True

    def _counted(self, exchange: Exchange, problem: Problem | None) -> None:
        """Whatever else went wrong there is for the model's own worker to say."""
        self._drop(exchange)
        if problem is not None and problem.code in _STOPS_BEFORE_LOAD:
            exchange.fail(Failure(problem.code, problem.message))
            self._over(exchange, problem.code)
        else:
            self._acquire(exchange)

    def _count_took_too_long(self, exchange: Exchange) -> None:
        self._cancel_count(exchange)
        self._counted(exchange, None)

    def _cancel_count(self, exchange: Exchange) -> None:
        if self._workers.text_worker is not None:
            self._workers.send(self._workers.text_worker, Cancel(epoch=self._workers.epoch, rid=exchange.count_rid))

    # ------------------------------------------------------------------ leases

    def _acquire(self, exchange: Exchange) -> None:
        exchange.stage = Stage.ACQUIRING
        self._exchanges[exchange.rid] = exchange
        self._enter(exchange, Step.QUEUED, "" if exchange.attempt == 0 else "again, as the worker was lost")
        request = exchange.request
        self._control.acquire(
            exchange.rid, request.model, request.hash(), request.priority, exchange.left_ms(self._loop.time())
        )

    def queued(self, message: Queued) -> None:
        """What it waits for; the feed knows how far the load is."""
        exchange = self._exchanges.get(message.rid)
        if exchange is None or exchange.stage is not Stage.ACQUIRING:
            return
        slot = self._control.feed.find(exchange.request.model)
        if message.state in LOADING:
            self._enter(exchange, Step.LOAD, (slot.stage if slot is not None else None) or message.state)
        else:
            self._enter(exchange, Step.QUEUED, "" if message.state == Step.QUEUED else message.state)

    def granted(self, message: Granted) -> None:
        exchange = self._exchanges.get(message.rid)
        if exchange is None:  # the client left while the grant was on its way
            self._control.release(message.lease, Code.CANCELLED)
            return
        exchange.granted = message
        exchange.stage = Stage.JOINING
        self._submit(exchange, message)

    def rejected(self, message: Rejected) -> None:
        exchange = self._exchanges.get(message.rid)
        if exchange is not None:
            self._drop(exchange)
            exchange.fail(Failure(message.code, message.message, message.retry_after_s))
            self._over(exchange, message.code)

    def lost(self, message: Lost) -> None:
        """The lease is void already, so there is nothing to release."""
        exchange = self._exchanges.get(message.rid)
        if exchange is not None and exchange.granted is not None and exchange.granted.lease == message.lease:
            self._workers.forget(exchange.granted.worker)
            self._drop(exchange)
            self._fail_or_retry(exchange, Failure(message.code, message.message))

    def _finish(self, exchange: Exchange, outcome: str) -> None:
        self._drop(exchange)
        if exchange.granted is not None:
            self._control.release(exchange.granted.lease, outcome, exchange.prompt_tokens, exchange.tokens)

    def _end(self, exchange: Exchange, outcome: str) -> None:
        self._finish(exchange, outcome)
        self._over(exchange, outcome)

    def _over(self, exchange: Exchange, outcome: str) -> None:
        """Whatever became of it before does not change any more."""
        exchange.trace.end(outcome, time.monotonic())
        self._records.settle(exchange.record)

    def _enter(self, exchange: Exchange, step: Step, detail: str = "") -> None:
        exchange.trace.enter(step, time.monotonic(), detail)

    def _drop(self, exchange: Exchange) -> None:
        exchange.stop_timer()
        self._exchanges.pop(exchange.count_rid if exchange.stage is Stage.COUNTING else exchange.rid, None)
        exchange.stage = Stage.DONE

    def _fail_or_retry(self, exchange: Exchange, failure: Failure) -> None:
        if exchange.may_retry(failure) and not self._closing:
            exchange.begin_again()
            self._acquire(exchange)
        else:
            exchange.fail(failure)
            self._over(exchange, failure.code)

    # ------------------------------------------------------------------ workers

    def _submit(self, exchange: Exchange, granted: Granted) -> None:
        """Now if the worker has joined, else when it does."""
        epoch = self._workers.epoch
        try:
            submit = exchange.request.submit(
                epoch=epoch,
                rid=exchange.rid,
                lease=granted.lease,
                defaults=granted.defaults,
                deadline_ms=exchange.left_ms(self._loop.time()),
            )
        except msgspec.ValidationError as e:
            self._finish(exchange, Code.INTERNAL)
            exchange.fail(Failure(Code.INTERNAL, f"A default of model {granted.model!r} is wrong: {e}"))
            self._over(exchange, Code.INTERNAL)
            return
        sent_at = time.monotonic()  # before it is: the worker's clock may start while this process is held up
        if self._workers.has_joined(granted.worker) and self._workers.send(granted.worker, submit):
            exchange.stage = Stage.RUNNING
            exchange.stop_timer()
            exchange.trace.enter(Step.PREPARE, sent_at)
        elif exchange.timer is None:
            self._enter(exchange, Step.JOIN)
            self._after(JOIN_LIMIT_S, exchange, lambda: self._worker_did_not_join(exchange))

    def _on_join(self, worker: str) -> None:
        for exchange in list(self._exchanges.values()):
            if exchange.stage is Stage.JOINING and exchange.granted is not None and exchange.granted.worker == worker:
                self._submit(exchange, exchange.granted)

    def _worker_did_not_join(self, exchange: Exchange) -> None:
        self._finish(exchange, Code.WORKER_LOST)
        self._fail_or_retry(exchange, Failure(Code.WORKER_LOST, "The model's worker process cannot be reached."))

    def _after(self, delay_s: float, exchange: Exchange, then: Callable[[], None]) -> None:
        exchange.stop_timer()
        exchange.timer = self._loop.call_later(delay_s, then)

    def _on_message(self, worker: str, message: WorkerMessage) -> None:
        if isinstance(message, Rows):
            now = time.monotonic()
            for row in message.rows:
                if exchange := self._running(worker, row.rid):
                    self._on_row(exchange, row, now)
            return
        exchange = self._exchanges.get(message.rid)
        if exchange is not None and exchange.stage is Stage.COUNTING:
            if isinstance(message, Result | Problem):
                self._counted(exchange, message if isinstance(message, Problem) else None)
        elif exchange := self._running(worker, message.rid):
            if isinstance(message, Accepted):
                exchange.accept(message)
                exchange.trace.accept(_expected(message), time.monotonic())
            elif isinstance(message, Result):
                self._finish(exchange, OK)
                self._over(exchange, OK)
                exchange.answer(message)
            else:
                self._finish(exchange, message.code)
                self._fail_or_retry(exchange, Failure(message.code, message.message))

    def _on_row(self, exchange: Exchange, row: Row, now: float) -> None:
        failure = exchange.output(row)
        exchange.trace.output(row, now)
        if failure is not None:
            exchange.fail(failure)
        if row.finish is not None and exchange.is_over:
            self._finish(exchange, OK if failure is None else failure.code)
            self._over(exchange, row.finish or OK)
        elif failure is not None:
            self.leave(exchange)  # the worker is still at it

    def _running(self, worker: str, rid: str) -> Exchange | None:
        exchange = self._exchanges.get(rid)
        if exchange is None or exchange.stage is not Stage.RUNNING or exchange.granted is None:
            return None
        return exchange if exchange.granted.worker == worker else None


def _expected(accepted: Accepted) -> Usage:
    """Until the last row says what it really was."""
    return Usage(
        prompt_tokens=accepted.prompt_tokens,
        completion_tokens=0,
        cached_hot=accepted.cached_hot,
        cached_cold=accepted.cached_cold,
    )
