"""Workers that died for want of memory: how such a death is told from others, and what is learnt from it.

The model is tried once more with more set aside; the request it died under is not. What was learnt outlives the server.
"""

from __future__ import annotations

from supervisor.budget import gib
from supervisor.slot_board import Board
from supervisor.slot_events import Remember, WorkerExited
from supervisor.slot_record import Failure, Slot, Worker

OOM = "oom"
SIGKILL = 9
WORDS = (
    "MemoryError",
    "std::bad_alloc",
    "Insufficient Memory",
    "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    "[metal::malloc]",
)
"""Last words of workers: of Python, of C++, of Metal's command buffers and of MLX's allocator."""
ALLOWED = 2
"""The second such death within the crash window is the last: more memory did not help."""


def ran_out(worker: Worker, event: WorkerExited) -> bool:
    """What the worker said of itself goes first; a kill of our own, for whatever reason, is no such death."""
    said = worker.failure or worker.fault
    if said is not None:
        return said.code == OOM
    if event.signal == SIGKILL:
        return event.oom_killed
    return event.code != 0 and any(word in event.tail for word in WORDS)


def learn(board: Board, slot: Slot, worker: Worker, how: str) -> Failure:
    """More is set aside for the next try: by a quarter more than was measured, and more than before in any case."""
    recent = [at for at in slot.oom_deaths if board.now - at < board.timers.crash_window_s]
    slot.oom_deaths = [*recent, board.now]
    before_bytes = slot.need_bytes
    seen_bytes = board.memory.workers.get(slot.model, 0) if board.memory is not None else 0
    peak_bytes = max(worker.peak_bytes, seen_bytes)
    wanted_bytes = max(peak_bytes * 5 // 4, before_bytes * 11 // 10)
    slot.measured_bytes = max(before_bytes, min(wanted_bytes, board.policy.budget_bytes))
    remember(board, slot)
    text = f"{slot.model} ran out of memory ({how}) with {gib(before_bytes)} set aside to load it"
    if len(slot.oom_deaths) < ALLOWED:
        text += f"; the next load sets aside {gib(slot.need_bytes)}"
    return Failure(OOM, text)


def is_hopeless(slot: Slot) -> bool:
    return len(slot.oom_deaths) >= ALLOWED


def remember(board: Board, slot: Slot) -> None:
    board.say(Remember(slot.model, slot.cost.load_key, slot.measured_bytes))


def forget(board: Board, slot: Slot) -> None:
    """Somebody says that it was not the model's fault."""
    slot.oom_deaths.clear()
    if slot.measured_bytes:
        slot.measured_bytes = 0
        remember(board, slot)
