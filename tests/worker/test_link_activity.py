"""Whether anything decodes here is said to whom it concerns: nobody, while there is no neighbour at work."""

import asyncio

from worker.link_activity import END_HELD_BACK_S, ActivityReport

LATER_S = END_HELD_BACK_S * 2


def said_in(script: list[tuple[str, object]]) -> list[bool]:
    said: list[bool] = []

    async def play() -> None:
        report = ActivityReport(lambda message: said.append(message.decoding))
        for name, value in script:
            if name == "wait":
                await asyncio.sleep(LATER_S)
            elif name == "neighbours":
                report.neighbours(int(str(value)))
            else:
                report.decodes(bool(value))

    asyncio.run(play())
    return said


def test_alone_nothing_is_said() -> None:
    assert said_in([("decodes", True), ("wait", 0), ("decodes", False), ("wait", 0)]) == []


def test_the_first_neighbour_is_told_how_it_is_and_then_of_changes() -> None:
    changes = [("neighbours", 2), ("wait", 0), ("decodes", False), ("wait", 0), ("decodes", True)]
    assert said_in([("decodes", True), ("neighbours", 1), *changes]) == [True, False, True]


def test_a_pause_between_two_requests_is_no_end() -> None:
    assert said_in([("neighbours", 1), ("decodes", True), ("decodes", False), ("decodes", True), ("wait", 0)]) == [False, True]


def test_after_the_last_neighbour_it_is_quiet_again_and_the_next_one_is_told_anew() -> None:
    script = [("neighbours", 1), ("neighbours", 0), ("decodes", True), ("wait", 0), ("neighbours", 1)]
    assert said_in(script) == [False, True]
