"""What workers hear of each other: nothing while alone, and otherwise every change once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.company import Company, Neighbours

A, B, C = b"w.0", b"w.1", b"w.2"


def test_who_is_alone_hears_nothing() -> None:
    company = Company()
    assert company.work([A]) == {}
    assert company.decodes(A, True) == {}
    assert company.work([]) == {}


def test_a_neighbour_counts_as_decoding_until_it_says_otherwise() -> None:
    company = Company()
    company.work([A])
    assert company.work([A, B]) == {A: Neighbours(1, 1, 2), B: Neighbours(1, 1, 2)}
    assert company.decodes(B, False) == {A: Neighbours(1, 0, 2)}
    assert company.decodes(B, False) == {}
    assert company.decodes(B, True) == {A: Neighbours(1, 1, 2)}


def test_prompts_that_take_turns_do_not_share_the_cores() -> None:
    company = Company()
    company.work([A, B, C])
    company.decodes(A, False)
    company.decodes(B, False)
    assert company.decodes(C, False)[A] == Neighbours(2, 0, 1)
    assert company.decodes(A, True) == {A: Neighbours(2, 0, 2), B: Neighbours(2, 1, 2), C: Neighbours(2, 1, 2)}


def test_the_one_that_is_left_hears_that_it_is_alone_and_the_idle_one_hears_nothing() -> None:
    company = Company()
    company.work([A, B])
    assert company.work([A]) == {A: Neighbours()}
    assert company.decodes(B, True) == {}


def test_a_death_is_the_end_of_company_too() -> None:
    company = Company()
    company.work([A, B])
    assert company.leave(B) == {A: Neighbours()}


def test_what_one_said_counts_until_it_hears_that_it_is_alone() -> None:
    company = Company()
    company.work([A, B])
    company.decodes(A, False)
    company.decodes(B, False)
    company.work([A])
    again = {A: Neighbours(1, 0, 2), B: Neighbours(1, 1, 2)}
    assert company.work([A, B]) == again, "A heard that it was alone and will say it again, B did not"


@given(st.lists(st.one_of(st.sets(st.sampled_from((A, B, C))), st.tuples(st.sampled_from((A, B, C)), st.booleans()))))
def test_whoever_is_busy_knows_the_state_of_the_others(steps: list[set[bytes] | tuple[bytes, bool]]) -> None:
    company, busy, quiet, known = Company(), set[bytes](), set[bytes](), dict[bytes, Neighbours]()
    for step in steps:
        if isinstance(step, tuple):
            worker, decoding = step
            known |= company.decodes(worker, decoding)
            if known.get(worker, Neighbours()).busy:
                quiet = quiet - {worker} if decoding else quiet | {worker}
        else:
            known |= company.work(step)
            quiet = {worker for worker in quiet if known[worker].busy}
            busy = step
        for worker in busy:
            computing = len(busy - quiet) + bool(busy & quiet)
            expected = Neighbours(len(busy) - 1, len(busy - quiet - {worker}), computing) if len(busy) > 1 else Neighbours()
            assert known.get(worker, Neighbours()) == expected
