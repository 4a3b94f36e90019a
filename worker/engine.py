"""One model behind a thread: jobs in, rows out.

The face that other threads see. All MLX calls, from the import on, happen on the thread that `start` spawns; this module itself
must not import MLX, so that the process shell comes up at once.
"""

import contextlib
import dataclasses
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Literal

from supervisor.protocol import Grant, Trim, Turn
from worker.blas import load_openblas
from worker.explain import Explanation, PromptMemory
from worker.faults import EXIT_FAILED, LoadFailed, failure_of
from worker.job import EngineBeat, Job, LoadSpec, LoadStage, Sink, Text
from worker.mailbox import Cancel, Halt, Mailbox, Probe, Warmed
from worker.meter import Meter
from worker.mlx_lm_import import tokenizers_later
from worker.spill import Spill
from worker.warm_start import WarmStart

_log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.001
"""How long the engine thread may hold the interpreter while the sockets' thread waits for it."""

OPEN_FILES = 2048
"""A lazily read model holds one descriptor per weight file."""


class Engine:
    def __init__(self, spec: LoadSpec, text: Text, sink: Sink) -> None:
        self._spec = spec
        self._text = text
        self._sink = sink
        self._mailbox = Mailbox()
        self._spill: Spill | None = None
        self._memory: PromptMemory | None = None
        self._warm_start: WarmStart | None = None
        self._meter = Meter()
        # A daemon: a step that hangs on the device must not keep the process from leaving.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Loads, warms up, then serves; the outcome goes to the sink."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._mailbox.put(job)

    def cancel(self, rid: str) -> None:
        """A row with finish "cancelled" follows, and then nothing. No effect on a request that is over."""
        self._mailbox.put(Cancel(rid))

    def probe(self, job: Job, answer: Callable[[int, int], None]) -> None:
        """Nothing is computed; the engine thread calls `answer` with the prompt's tokens in RAM and on disk."""
        self._mailbox.put(Probe(job, answer))

    def grant(self, grant: Grant | Turn) -> None:
        self._mailbox.put(grant)

    def trim(self, level: Literal["soft", "hard", "critical"], target_bytes: int) -> None:
        """Gives memory back: the RAM tier of the prefix cache first, MLX's freed buffers always."""
        self._mailbox.put(Trim(level=level, target_bytes=target_bytes))

    def beat(self) -> EngineBeat:
        beat, spill = self._meter.beat(time.monotonic()), self._spill
        if spill is None:
            return beat
        # Writing goes on while the engine idles, and what is written must not be charged as credit for longer than need be.
        cache = {**beat.cache, **spill.counters()}
        return dataclasses.replace(beat, cache=cache, cache_trouble=spill.trouble, store_written_bytes=spill.written_bytes)

    def explain(self, request_id: str) -> list[Explanation]:
        """What became of a request's prompt in the cache; nothing for one that is not remembered."""
        return [] if self._memory is None else self._memory.of(request_id)

    def stop(self, flush_deadline_s: float) -> tuple[int, int]:
        """Ends every request with an error and the thread, within the deadline. Returns cache blocks written and dropped."""
        until = time.monotonic() + flush_deadline_s
        if self._warm_start is not None:
            self._warm_start.stop()
        self._mailbox.put(Halt())
        if self._thread.is_alive():
            self._ended.wait(max(0.0, until - time.monotonic()))
        spill = self._spill
        return (0, 0) if spill is None else spill.close(max(0.0, until - time.monotonic()))

    def _main(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            self._serve()
        except LoadFailed as e:
            self._sink.failed(e.code, str(e), e.exit_code)
        except Exception as e:  # the thread's boundary: the process must learn that its engine is gone
            _log.exception("the engine failed")
            self._sink.failed(failure_of(e), f"{type(e).__name__}: {e}", EXIT_FAILED)
        self._ended.set()
        # MLX aborts a process whose main thread ends after the thread that compiled its functions did; so this one stays.
        threading.Event().wait()

    def _serve(self) -> None:
        self._progress("import", 0, 1)
        load_openblas()
        with _open_files_limit_kept():
            try:
                with tokenizers_later():
                    from worker.start_up import bring_up, warm_start
            except ImportError:  # another mlx_lm may name more than we stand in for: then all of it is imported
                from worker.start_up import bring_up, warm_start
        self._progress("import", 1, 1)
        scheduler, loaded = bring_up(self._spec, self._text, self._sink, self._meter, self._progress)
        if scheduler.prefix is not None:
            self._spill = scheduler.prefix.spill
            self._memory = scheduler.memory
        self._meter.end()
        self._sink.loaded(loaded)
        if scheduler.prefix is not None:
            self._warm_start = warm_start(self._spec, scheduler.prefix, lambda b: self._mailbox.put(Warmed(b)), self._is_busy)
        if self._warm_start is not None:
            self._warm_start.start()
        while not scheduler.halted:
            for command in self._mailbox.take(scheduler.patience_s):
                scheduler.handle(command)
            scheduler.step()

    def _is_busy(self) -> bool:
        beat = self.beat()
        return beat.busy_s > 0 or beat.running > 0 or beat.waiting > 0

    def _progress(self, stage: LoadStage, done: int, total: int) -> None:
        self._meter.begin(time.monotonic())
        self._meter.advance(1)
        self._sink.progress(stage, done, total)


@contextlib.contextmanager
def _open_files_limit_kept() -> Generator[None]:
    """mlx_lm sets the limit to 2048 of 4096 when it is imported: good where it was 256, bad where it was more, and an error
    that ends the import where less is allowed.
    """
    original = resource.setrlimit
    resource.setrlimit = lambda _resource, _limits: None
    try:
        yield
    finally:
        resource.setrlimit = original
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
