"""When memory counts as short, for how long, and what other programs leave of the budget."""

from __future__ import annotations

from dataclasses import replace

from supervisor.budget import GIB, MIB, Tier
from supervisor.pressure import CALM_S, Gauge, Level, Limits, Reading, Thresholds, thresholds

MARKS = Thresholds(0.8, 0.9, 0.95)
EASY = Reading(total_bytes=100 * GIB, available_bytes=60 * GIB, tree_bytes=20 * GIB, own_bytes=GIB, private_bytes=18 * GIB)


def used(share: float, **other: int | Level) -> Reading:
    return replace(EASY, available_bytes=int(100 * GIB * (1 - share)), **other)


def gauge(budget_bytes: int = 60 * GIB, tree_bytes: int | None = None) -> Gauge:
    return Gauge(Limits(budget_bytes, tree_bytes), MARKS)


def test_each_tier_has_its_soft_threshold_and_the_others_follow() -> None:
    assert thresholds(Tier.SAFE) == Thresholds(0.85, 0.925, 0.9625)
    assert [thresholds(tier).soft for tier in Tier] == [0.85, 0.90, 0.925, 0.925]
    assert thresholds(Tier.SAFE, 0.5, 0.4, 0.6) == Thresholds(0.5, 0.5, 0.6), "hard is never below soft"


def test_a_level_begins_at_once_but_the_critical_one_needs_two_readings() -> None:
    subject = gauge()
    assert subject.read(EASY, 0).level is Level.NONE
    assert subject.read(used(0.81), 1).level is Level.SOFT
    assert subject.read(used(0.96), 2).level is Level.HARD
    verdict = subject.read(used(0.96), 3)
    assert verdict.level is Level.CRITICAL
    assert verdict.because == "96.0 GiB of this machine's 100.0 GiB are in use"


def test_a_level_ends_when_it_has_been_clearly_better_for_a_while() -> None:
    subject = gauge()
    subject.read(used(0.91), 0)
    for second in range(1, 60):
        assert subject.read(used(0.89), second).level is Level.HARD, "just below the mark is not better"
    assert subject.read(used(0.85), 60).level is Level.HARD
    assert subject.read(used(0.89), 61).level is Level.HARD
    assert subject.read(used(0.85), 62).level is Level.HARD, "the time begins anew"
    assert subject.read(used(0.85), 62 + CALM_S).level is Level.SOFT
    subject.read(used(0.5), 70)
    verdict = subject.read(used(0.5), 70 + CALM_S)
    assert (verdict.level, verdict.because, verdict.over_bytes) == (Level.NONE, "", 0)


def test_the_users_limit_of_the_process_tree_counts_like_memory() -> None:
    subject = gauge(tree_bytes=20 * GIB)
    verdict = subject.read(replace(EASY, tree_bytes=19 * GIB, available_bytes=90 * GIB), 0)
    assert verdict.level is Level.HARD
    assert verdict.because == "the server's processes take 19.0 GiB of the 20.0 GiB allowed"
    assert verdict.over_bytes == 19 * GIB - int(0.78 * 20 * GIB)


def test_swapping_counts_whether_swap_grows_or_only_churns() -> None:
    subject = gauge()
    subject.read(replace(EASY, swapped_out_bytes=GIB, swap_used_bytes=GIB), 0)
    assert subject.read(replace(EASY, swapped_out_bytes=GIB, swap_used_bytes=GIB), 5).level is Level.NONE, (
        "old swap is no pressure"
    )
    verdict = subject.read(replace(EASY, swapped_out_bytes=GIB + 100 * MIB, swap_used_bytes=GIB), 6)
    assert verdict.level is Level.SOFT and "swapped out within 10 s" in verdict.because and verdict.over_bytes > 0
    assert subject.read(replace(EASY, swapped_out_bytes=GIB, swap_used_bytes=2 * GIB), 7).level is Level.HARD


def test_swap_that_stands_still_again_is_forgotten() -> None:
    subject = gauge()
    subject.read(EASY, 0)
    for second in range(1, 30):
        level = subject.read(replace(EASY, swap_used_bytes=GIB), second).level
    assert level is Level.NONE


def test_the_systems_own_word_counts() -> None:
    assert gauge().read(replace(EASY, kernel=Level.HARD), 0).level is Level.HARD


def test_other_programs_that_grow_shrink_the_budget_and_it_comes_back_with_them() -> None:
    subject = gauge(budget_bytes=80 * GIB)
    verdict = subject.read(replace(EASY, available_bytes=30 * GIB), 0)  # 18 of what is in use are ours
    assert (verdict.budget_bytes, verdict.budget_because) == (48 * GIB, "other programs hold 52.0 GiB of 100.0 GiB")
    assert verdict.outside_bytes == 52 * GIB
    verdict = subject.read(replace(EASY, available_bytes=70 * GIB), 1)
    assert (verdict.budget_bytes, verdict.budget_because) == (80 * GIB, "")


def test_what_our_own_tree_takes_does_not_shrink_the_budget() -> None:
    subject = gauge(budget_bytes=80 * GIB)
    for tree in (0, 40 * GIB, 75 * GIB):
        reading = replace(EASY, available_bytes=85 * GIB - tree, tree_bytes=tree, private_bytes=tree)
        assert subject.read(reading, 0).budget_bytes == 80 * GIB


def test_large_processes_of_the_servers_own_leave_workers_less_of_the_trees_limit() -> None:
    verdict = gauge(budget_bytes=9 * GIB, tree_bytes=10 * GIB).read(replace(EASY, tree_bytes=5 * GIB, own_bytes=2 * GIB), 0)
    assert verdict.budget_bytes == 8 * GIB and "the server's own processes take 2.0 GiB" in verdict.budget_because
