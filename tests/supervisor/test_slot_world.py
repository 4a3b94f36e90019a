"""Random worlds around the slot machine: many short ones that Hypothesis makes up and shrinks, and whole days from a seed."""

import pytest
from hypothesis import HealthCheck, settings

from tests.supervisor.slot_day import HOUR_S, Day
from tests.supervisor.slot_world import World

World.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)
TestSlotsInARandomWorld = World.TestCase


@pytest.mark.parametrize("seed", range(2))
def test_twenty_four_hours_of_load_faults_reloads_and_jumps_of_the_clock(seed: int) -> None:
    day = Day(seed)
    day.live(24 * HOUR_S)
    happened = {"ready", "crash", "hang", "jump", "gateway", "catalog", "unload", "deadline"}
    assert happened | {"pressure", "wants", "memory back", "memory late"} <= set(day.seen), day.seen
    day.end()
