"""Moments of a clock that sleeps with the machine, shown by the calendar."""

from supervisor.dates import KEPT, Dates


def test_what_was_before_a_sleep_keeps_its_date() -> None:
    dates = Dates(100.0, 5000.0)
    assert dates.date(110.0) == 5010.0
    dates.note(120.0, 5020.0)
    dates.note(121.0, 5021.0 + 3600)
    dates.note(122.0, 5022.4 + 3600)
    assert [dates.date(moment) for moment in (50.0, 110.0, 120.9, 121.0, 130.0)] == [4950, 5010, 5020.9, 8621, 8630]


def test_a_clock_that_is_put_right_bit_by_bit_is_followed() -> None:
    dates = Dates(0.0, 1000.0)
    for second in range(1, 1000):
        dates.note(float(second), 1000.0 + second * 1.01)
    assert abs(dates.date(999.0) - (1000.0 + 999 * 1.01)) <= 1.1


def test_of_very_many_sleeps_the_last_are_known() -> None:
    dates = Dates(0.0, 0.0)
    for night in range(1, 2 * KEPT):
        dates.note(float(night), night * 100.0)
    assert dates.date(2 * KEPT - 1) == (2 * KEPT - 1) * 100.0 and dates.date(2 * KEPT - 2) == (2 * KEPT - 2) * 100.0
