"""Every request of a model's worker from submit to its last row: through the pool into the engine, and the rows back out.

Lives on the event loop, but for `send_rows`. Knows gateways and the engine by their faces, and not how the model was loaded.
"""

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from supervisor.ipc import PeerStuck
from supervisor.protocol import Accepted, Code, Problem, Result, Row, Rows, Submit, Usage
from worker.engine import Engine
from worker.job import Job, Matcher
from worker.link_gateway import GatewayLink
from worker.link_sink import hop
from worker.prompt import NOTHING, FittedPrompt, Refused, fitted_prompt, refuse_unsupported
from worker.structured import compiled
from worker.text import Text
from worker.token_names import be_readable, named
from worker.vocabulary import Vocabulary
from worker.volatile import Volatile

_log = logging.getLogger(__name__)
UNLOADING = "the model is being unloaded"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the pool makes of a request."""

    prompt: FittedPrompt
    matcher: Matcher | None = None
    echo: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    gateway: GatewayLink
    epoch: str
    submit: Submit
    submitted_at: float
    prompt: FittedPrompt | None = None
    """None while the pool is at it; the engine has the request from then on."""
    unfinished: int = 1
    """Choices whose last row is still to come."""
    cancelled: bool = False
    too_late: bool = False
    deadline: asyncio.TimerHandle | None = None
    preparing: "Future[Prepared] | None" = None

    def refuse(self, code: str, message: str, *, retryable: bool = False) -> None:
        problem = Problem(code=code, message=message, rid=self.submit.rid, epoch=self.epoch, retryable=retryable)
        self.gateway.send(problem)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    text: Text
    engine: Engine
    context: int
    volatile: Volatile = NOTHING


class ModelRequests:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, Request] = {}
        self._model: LoadedModel | None = None
        self._vocabulary: Vocabulary | None = None
        self._refusing = False
        self._silent = False

    @property
    def preparing(self) -> int:
        """Requests that the engine has not seen yet."""
        return sum(request.prompt is None for request in self._requests.values())

    @property
    def unfinished(self) -> int:
        """Requests whose last row is still to come."""
        return len(self._requests)

    def open(self, model: LoadedModel) -> None:
        """From now on requests are served."""
        self._model = model
        self._vocabulary = Vocabulary(model.text.tokenizer, model.text.vocab_size, model.text.eos_ids)

    # ------------------------------------------------------------------ from the gateways

    def submit(self, gateway: GatewayLink, message: Submit) -> None:
        if self._silent:
            return
        request = Request(gateway, gateway.epoch, message, time.monotonic(), unfinished=message.sampling.n or 1)
        if message.rid in self._requests:
            request.refuse(Code.BAD_REQUEST, f"request id {message.rid!r} is already in use")
        elif self._refusing:
            request.refuse(Code.SHUTTING_DOWN, UNLOADING)
        elif self._model is None or self._vocabulary is None:
            request.refuse(Code.BUSY, "the model is still loading", retryable=True)
        else:
            self._requests[message.rid] = request
            if message.deadline_ms is not None:
                request.deadline = self._loop.call_later(message.deadline_ms / 1000, self._too_late, request)
            request.preparing = self._pool.submit(prepare, self._model, self._vocabulary, message)
            request.preparing.add_done_callback(lambda done: hop(self._loop, self._prepared, request, done))

    def cancel(self, rid: str) -> None:
        """A last row follows in any case: the lease is held until then."""
        request = self._requests.get(rid)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if request.preparing is not None:
            request.preparing.cancel()  # one that still waits for the pool: its prompt would be tokenized for nobody
        if request.prompt is not None and self._model is not None:
            self._model.engine.cancel(rid)

    def drop(self, gateway: GatewayLink) -> None:
        """Nobody listens to what that gateway asked for."""
        for rid, request in list(self._requests.items()):
            if request.gateway is gateway:
                self.cancel(rid)
                self._forget(rid)

    def _too_late(self, request: Request) -> None:
        request.too_late = True
        self.cancel(request.submit.rid)

    # ------------------------------------------------------------------ from the pool

    def _prepared(self, request: Request, done: "Future[Prepared]") -> None:
        rid = request.submit.rid
        if self._requests.get(rid) is not request or self._model is None:
            return  # dropped meanwhile
        if request.cancelled:
            self._end_cancelled(request)
            return
        error = done.exception()
        if isinstance(error, Refused):
            self.refuse(rid, error.code, error.message)
        elif error is not None:
            _log.error("preparing a request failed", exc_info=error)
            self.refuse(rid, Code.INTERNAL, f"preparing the request failed: {type(error).__name__}")
        elif request.submit.task == "count":
            self._count(request, done.result(), self._model)
        else:
            prepared = done.result()
            request.prompt = prepared.prompt
            self._model.engine.submit(job(request.submit, prepared, request.submitted_at))

    def _end_cancelled(self, request: Request) -> None:
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        choices, rid = range(request.unfinished), request.submit.rid
        self.rows([Row(rid=rid, choice=choice, seq=0, tokens=0, finish="cancelled", usage=usage) for choice in choices])

    def _count(self, request: Request, prepared: Prepared, model: LoadedModel) -> None:
        counted: dict[str, object] = {"prompt_tokens": len(prepared.prompt.ids), "context": model.context}
        if "cache" not in request.submit.want:
            self._answer(request, counted)
            return

        def probed(hot: int, cold: int) -> None:
            hop(self._loop, self._answer, request, {**counted, "hot": hot, "cold": cold})

        model.engine.probe(job(request.submit, prepared, request.submitted_at), probed)

    def _answer(self, request: Request, data: dict[str, object]) -> None:
        rid = request.submit.rid
        if self._requests.get(rid) is not request:
            return  # dropped meanwhile
        if request.cancelled:
            self._end_cancelled(request)
        else:
            request.gateway.send(Result(epoch=request.epoch, rid=rid, data=data))
            self._forget(rid)

    # ------------------------------------------------------------------ from the engine

    def accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None:
        request = self._requests.get(rid)
        if request is None or request.prompt is None:
            return
        accepted = Accepted(
            epoch=request.epoch,
            rid=rid,
            prompt_tokens=len(request.prompt.ids),
            max_tokens=request.prompt.max_tokens,
            cached_hot=cached_hot,
            cached_cold=cached_cold,
            position=position,
        )
        request.gateway.send(accepted)

    def send_rows(self, rows: list[Row]) -> bool:
        """On the engine's thread: sends what needs no thought, which is all but the first and last of an answer.

        Of the loop's state it only reads. What a gateway hears of a request that the loop ends meanwhile it ignores.
        """
        first: Request | None = None
        for row in rows:
            request = self._requests.get(row.rid)
            if request is None or row.finish is not None or row.logprobs is not None:
                return False
            first = first or request
            if request.gateway is not first.gateway or request.epoch != first.epoch:
                return False
        if first is not None:
            try:  # the gateway's own epoch may be its next life's by now, which never asked for this
                first.gateway.send(Rows(epoch=first.epoch, rows=rows))
            except PeerStuck:  # the loop survives that; here it would end the engine
                return False
        return True

    def rows(self, rows: list[Row]) -> None:
        """One message per gateway and step."""
        wanted: dict[GatewayLink, list[Row]] = {}
        for row in rows:
            request = self._requests.get(row.rid)
            if request is None:
                continue
            if row.finish == "cancelled" and request.too_late:
                self.refuse(row.rid, Code.DEADLINE, "the request's deadline has passed")
                continue
            if row.finish == "error":
                self._give_up(request)
                continue
            wanted.setdefault(request.gateway, []).append(self._named(row, request))
            if row.finish is not None:
                request.unfinished -= 1
                if not request.unfinished:
                    self._forget(row.rid)
        for gateway, theirs in wanted.items():
            gateway.send(Rows(epoch=gateway.epoch, rows=theirs))

    def _give_up(self, request: Request) -> None:
        """Its grammar could not go on: no fault of the server, and the same request would fail again."""
        self.refuse(request.submit.rid, Code.BAD_SCHEMA, "The format asked for became too complex to enforce; make it simpler.")
        if self._model is not None:
            self._model.engine.cancel(request.submit.rid)

    def _named(self, row: Row, request: Request) -> Row:
        if row.logprobs is None or self._vocabulary is None:
            return row
        logprobs = row.logprobs
        if request.submit.task == "chat" and row.finish == "stop" and row.stop_string is None:
            logprobs = logprobs[:-1]  # the end token is no part of a message; lm-eval counts on it in a completion
        return msgspec.structs.replace(row, logprobs=named(self._vocabulary, logprobs))

    def refuse(self, rid: str, code: str, message: str) -> None:
        """That request is over; no effect if it already was."""
        if rid in self._requests:
            self._requests[rid].refuse(code, message)
            self._forget(rid)

    # ------------------------------------------------------------------ the end

    def refuse_preparing(self) -> None:
        """No request reaches the engine any more."""
        self._refusing = True
        for rid, request in list(self._requests.items()):
            if request.prompt is None:
                self.refuse(rid, Code.SHUTTING_DOWN, UNLOADING)

    def refuse_all(self, code: str, message: str) -> None:
        self._refusing = True
        for rid in list(self._requests):
            self.refuse(rid, code, message)

    def fall_silent(self) -> None:
        self._silent = True
        for rid in list(self._requests):
            self._forget(rid)

    def _forget(self, rid: str) -> None:
        request = self._requests.pop(rid)
        if request.deadline is not None:
            request.deadline.cancel()


def prepare(model: LoadedModel, vocabulary: Vocabulary, submit: Submit) -> Prepared:
    """In the pool. Raises Refused."""
    if submit.task == "count":
        return Prepared(_fitted(model, submit))
    refuse_unsupported(submit)
    matcher = compiled(vocabulary, submit.response_format)
    prompt = _fitted(model, submit)
    if submit.logprobs is not None:
        be_readable(vocabulary)
    echo = submit.prompt.text if submit.prompt.text is not None else model.text.decode(prompt.ids)
    return Prepared(prompt, matcher, echo if submit.echo else None)


def _fitted(model: LoadedModel, submit: Submit) -> FittedPrompt:
    return fitted_prompt(model.text, submit, model.context, model.volatile)


def job(submit: Submit, prepared: Prepared, submitted_at: float) -> Job:
    return Job(
        rid=submit.rid,
        prompt=prepared.prompt.ids,
        sampling=submit.sampling,
        max_tokens=prepared.prompt.max_tokens,
        stops=tuple(submit.stop),
        cache_salt=submit.cache_salt or "",
        lease=submit.lease,
        submitted_at=submitted_at,
        prepared_at=time.monotonic(),
        priority=submit.priority,
        logprobs=submit.logprobs,
        echo=prepared.echo,
        matcher=prepared.matcher,
    )
