"""The service of a model: opens its tokenizer, starts its engine, and says how both are doing.

Requests are `ModelRequests`' business; the order of the process's life is the link's.
"""

import asyncio
import faulthandler
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from supervisor.protocol import (
    Activity,
    AskTurn,
    Assign,
    Beat,
    Code,
    GiveTurn,
    Grant,
    LoadProgress,
    ModelRef,
    Ready,
    Row,
    Submit,
    Trim,
    Turn,
    Want,
)
from worker.engine import Engine
from worker.faults import EXIT_FAILED, EXIT_UNLOADABLE
from worker.job import EngineBeat, Loaded, LoadSpec, LoadStage
from worker.link import Host
from worker.link_activity import ActivityReport
from worker.link_gateway import GatewayLink
from worker.link_requests import LoadedModel, ModelRequests
from worker.link_sink import EngineSink
from worker.stall_watch import StallWatch
from worker.text import ModelUnreadable, Text
from worker.volatile import volatile_of

_log = logging.getLogger(__name__)
STALLED_STEP_S = 60.0


class ModelService:
    def __init__(self, assign: Assign, model: ModelRef, host: Host) -> None:
        self._assign = assign
        self._model = model
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._engine: Engine | None = None
        self._early: list[Grant | Turn] = []
        """Said while the tokenizer opened: there was no engine yet to heed it."""
        self._requests = ModelRequests(self._pool)
        self._activity = ActivityReport(host.say)
        self._is_loaded = False
        self._stalls = StallWatch(_stalled_step_s(assign.settings))

    # ------------------------------------------------------------------ loading

    def start(self) -> None:
        self._host.progress(LoadProgress(stage="tokenizer"))
        self._opening = self._loop.create_task(self._open())

    async def _open(self) -> None:
        try:
            self._text = await self._loop.run_in_executor(self._pool, Text.open, Path(self._model.path))
        except ModelUnreadable as e:
            self._host.fail(Code.MODEL_UNLOADABLE, str(e), EXIT_UNLOADABLE)
        except Exception as e:  # a task's boundary
            _log.exception("the tokenizer did not open")
            self._host.fail(Code.MODEL_FAILED, f"{type(e).__name__}: {e}", EXIT_FAILED)
        else:
            spec = LoadSpec(
                ref=self._model,
                max_batch=self._assign.max_batch,
                grants=self._assign.grants,
                cache=self._assign.cache,
                settings=self._assign.settings,
            )
            self._engine = Engine(spec, self._text, EngineSink(self._loop, self))
            self._engine.start()
            for message in self._early:
                self._engine.grant(message)
            self._early.clear()

    def on_progress(self, stage: LoadStage, done: int, total: int) -> None:
        self._host.progress(LoadProgress(stage=stage, done=done, total=total))

    def on_loaded(self, info: Loaded) -> None:
        assert self._engine is not None
        self._is_loaded = True
        volatile = volatile_of(self._assign.settings)
        self._requests.open(LoadedModel(self._text, self._engine, info.context, volatile))
        ready = Ready(
            context=info.context,
            weights_bytes=info.weights_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
            peak_bytes=info.peak_bytes,
            max_inflight=self._assign.max_batch,
            load_s=info.load_s,
            cache_namespace=info.cache_namespace,
            cache_layout=info.cache_layout,
            capabilities=info.capabilities,
            defaults=self._text.defaults,
        )
        self._host.loaded(ready)

    def on_failed(self, code: str, message: str, exit_code: int) -> None:
        if code != Code.GPU_FAULT:  # that one the supervisor tells: a gateway told by us would ask us again at once
            self._requests.refuse_all(code, message)
        self._host.fail(code, message, exit_code)

    # ------------------------------------------------------------------ requests

    def submit(self, gateway: GatewayLink, message: Submit) -> None:
        self._requests.submit(gateway, message)

    def cancel(self, rid: str) -> None:
        self._requests.cancel(rid)

    def drop(self, gateway: GatewayLink) -> None:
        self._requests.drop(gateway)

    def on_accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None:
        self._requests.accepted(rid, cached_hot, cached_cold, position)

    def send_rows(self, rows: list[Row]) -> bool:
        return self._requests.send_rows(rows)

    def on_rows(self, rows: list[Row]) -> None:
        self._requests.rows(rows)

    def on_want(self, kv_bytes: int) -> None:
        self._host.say(Want(kv_bytes=kv_bytes, hot_bytes=self._assign.cache.hot_bytes))

    def on_tell(self, message: Activity | AskTurn | GiveTurn) -> None:
        if isinstance(message, Activity):
            self._activity.decodes(message.decoding)
        else:
            self._host.say(message)

    def on_error(self, rid: str, code: str, message: str) -> None:
        self._requests.refuse(rid, code, message)

    # ------------------------------------------------------------------ the supervisor's wishes

    def configure(self, settings: Mapping[str, object]) -> None:
        """What is set for a model takes effect when it is next loaded."""

    def beat(self, seq: int) -> Beat:
        engine = self._engine.beat() if self._engine is not None else EngineBeat()
        if self._is_loaded and self._stalls.is_due(engine.busy_s, time.monotonic()):
            _log.warning("a step has been running for %.0f s; this is where the threads are", engine.busy_s)
            faulthandler.dump_traceback(all_threads=True)
        return Beat(
            seq=seq,
            progress=engine.progress,
            busy_s=engine.busy_s,
            running=engine.running,
            # The engine counts at the end of a round, and a device may hang in the first: what was begun is work all along.
            waiting=max(engine.waiting + self._requests.preparing, self._requests.unfinished - engine.running),
            parked=engine.parked,
            parks=engine.parks,
            resumes=engine.resumes,
            mx_active_bytes=engine.mx_active_bytes,
            mx_cache_bytes=engine.mx_cache_bytes,
            mx_peak_bytes=engine.mx_peak_bytes,
            kv_bytes=engine.kv_bytes,
            hot_bytes=engine.hot_bytes,
            store_written_bytes=engine.store_written_bytes,
            cache=dict(engine.cache),
            draft=dict(engine.draft),
            cache_trouble=engine.cache_trouble,
            lease_tokens=dict(engine.lease_tokens),
            turns_passed_on=engine.turns_passed_on,
        )

    def grant(self, message: Grant | Turn) -> None:
        if isinstance(message, Grant) and message.neighbours_busy is not None:
            self._activity.neighbours(message.neighbours_busy)
        if self._engine is None:
            self._early.append(message)
        else:
            self._engine.grant(message)

    def trim(self, message: Trim) -> None:
        if self._engine is not None:
            self._engine.trim(message.level, message.target_bytes)

    def explain(self, request_id: str) -> list[str]:
        found = [] if self._engine is None else self._engine.explain(request_id)
        return [line for explanation in found for line in explanation.lines(self._text.decode)]

    def refuse_new(self) -> None:
        self._requests.refuse_preparing()

    def fall_silent(self) -> None:
        self._requests.fall_silent()

    def flush(self, deadline_s: float) -> tuple[int, int]:
        if self._engine is None or not self._is_loaded:
            return 0, 0  # nothing to save, and a load cannot be interrupted: the process just leaves
        return self._engine.stop(deadline_s)


def _stalled_step_s(settings: Mapping[str, object]) -> float:
    given = settings.get("stalled_step_s")
    return float(given) if isinstance(given, int | float) else STALLED_STEP_S
