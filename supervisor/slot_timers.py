"""Which alarms a slot has set, and for when: a pure reading of the record. What an alarm does is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from supervisor.slot_events import SlotState
from supervisor.slot_record import Slot, Worker
from supervisor.slot_rules import Timers

DUMP_GRACE_S = 1.0  # for faulthandler to write the stacks before the kill
LOOKS_PER_BEAT_LOST = 6
GAP_LOOKS = 2  # looks that were missed: the machine was not run although it had asked to be


class Alarm(StrEnum):
    HELLO = "hello"
    LOAD_STALL = "load stall"
    BEAT_LOST = "beat lost"
    NO_PROGRESS = "no progress"
    DUMPED = "dumped"
    DRAIN = "drain"
    STOP = "stop"
    BACKOFF = "backoff"
    TTL = "ttl"


def look_s(timers: Timers) -> float:
    """How often the machine wants to be run while a worker lives, only to know that it is."""
    return timers.beat_lost_s / LOOKS_PER_BEAT_LOST


def gap_s(timers: Timers) -> float:
    """Nothing handled for so long means that this process did not run: it was stopped, or starved, or the machine slept."""
    return look_s(timers) * GAP_LOOKS


def next_alarm(slot: Slot, timers: Timers) -> tuple[float, Alarm] | None:
    return min(_alarms(slot, timers), default=None)


def _alarms(slot: Slot, timers: Timers) -> Iterator[tuple[float, Alarm]]:
    if slot.state is SlotState.BACKOFF and slot.backoff_until is not None:
        yield slot.backoff_until, Alarm.BACKOFF
    worker = slot.worker
    if worker is None:
        return
    match slot.state:
        case SlotState.SPAWNING:
            yield slot.since + timers.hello_s, Alarm.HELLO
        case SlotState.LOADING:
            yield worker.progress_at + timers.load_stall_s, Alarm.LOAD_STALL
        case SlotState.READY | SlotState.DRAINING:
            yield from _liveness(worker, timers)
            if slot.idle and not slot.serving and not slot.pinned and slot.cost.ttl_s is not None:
                yield slot.last_used + slot.cost.ttl_s, Alarm.TTL
            if worker.drain_until is not None:
                yield worker.drain_until, Alarm.DRAIN
        case SlotState.STOPPING:
            if worker.stop_at is not None:
                yield worker.stop_at, Alarm.STOP
        case _:
            pass


def _liveness(worker: Worker, timers: Timers) -> Iterator[tuple[float, Alarm]]:
    """The heartbeat proves the process, the counter proves the engine: a heartbeat also ticks while the GPU hangs."""
    yield worker.beat_at + timers.beat_lost_s, Alarm.BEAT_LOST
    if worker.queued > 0:
        if worker.dumped_at is not None:
            yield worker.dumped_at + DUMP_GRACE_S, Alarm.DUMPED
        else:
            yield worker.counter_at + timers.no_progress_s, Alarm.NO_PROGRESS
