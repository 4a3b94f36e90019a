"""Stacks are written once for a step that lasts, not for every look at it, and not for every step of a slow model."""

from worker.stall_watch import QUIET_S, StallWatch


def test_a_step_is_shown_once_when_it_has_lasted_for_the_limit() -> None:
    watch = StallWatch(10)
    due = [busy_s for busy_s in (0, 5, 10, 11, 50, QUIET_S + 20) if watch.is_due(busy_s, 100 + busy_s)]
    assert due == [10]


def test_the_next_long_step_is_shown_too_but_not_at_once() -> None:
    watch = StallWatch(10)
    assert watch.is_due(10, 100)
    assert not watch.is_due(10, 100 + QUIET_S - 1)
    assert watch.is_due(12, 100 + QUIET_S + 1)


def test_an_idle_engine_never_is() -> None:
    watch = StallWatch(10)
    assert not any(watch.is_due(0.0, now) for now in range(0, 10_000, 100))
