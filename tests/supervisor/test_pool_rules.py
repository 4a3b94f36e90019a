from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.pool import Ledger, Line, Victim, Waiter, choose_victims


def waiter(rid: str, model: str = "a", gateway: str = "g.1", deadline_at: float | None = None) -> Waiter:
    return Waiter(rid, gateway, model, deadline_at, "", 0, 0.0)


def test_the_line_keeps_the_order_of_arrival_per_model() -> None:
    line = Line()
    for rid, model in (("r1", "a"), ("r2", "b"), ("r3", "a")):
        line.add(waiter(rid, model))
    assert [one.rid for one in line.of_model("a")] == ["r1", "r3"]
    line.remove("r1")
    assert [one.rid for one in line.of_model("a")] == ["r3"] and "r1" not in line


def test_removing_one_who_does_not_wait_is_nothing() -> None:
    Line().remove("r1")


def test_the_line_knows_who_is_overdue() -> None:
    line = Line()
    line.add(waiter("r1", deadline_at=5.0))
    line.add(waiter("r2", model="b", deadline_at=3.0))
    line.add(waiter("r3"))
    assert line.next_deadline() == 3.0
    assert [one.rid for one in line.overdue(4.0)] == ["r2"]


def test_a_charge_rises_but_never_falls() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", 4)
    ledger.raise_to("a", 3)
    assert ledger.charge_bytes("a") == 4
    ledger.raise_to("a", 6)
    assert (ledger.charged_bytes, ledger.free_bytes) == (6, 4)
    ledger.release("a")
    assert ledger.free_bytes == 10


@given(st.integers(1, 50), st.lists(st.integers(1, 20), max_size=8))
def test_victims_are_just_enough_or_none(needed: int, sizes: list[int]) -> None:
    charges = {str(number): size for number, size in enumerate(sizes)}
    chosen = choose_victims(needed, [Victim(model, size) for model, size in charges.items()])
    freed = sum(charges[model] for model in chosen)
    if sum(sizes) < needed:
        assert chosen == ()
    else:
        assert freed >= needed
        assert all(freed - charges[model] < needed for model in chosen)
