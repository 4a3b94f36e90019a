"""The steps of an answer follow each other without a gap, whatever becomes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.records import KEPT, KEPT_ANSWERS, Records
from gateway.timings import summary_of
from gateway.trace import MAX_MARKS, Mark, Step, Trace
from supervisor.protocol import Row, Timings, Usage

FIRST = Timings(prepare_s=1, queued_s=2, restore_s=3, prefill_s=4, first_token_s=10)
LAST = Timings(prepare_s=1, queued_s=2, restore_s=3, prefill_s=4, first_token_s=10, decode_s=5)


def begun(rid: str = "r.0") -> Trace:
    """Submitted to a worker after one second."""
    trace = Trace(rid, [Mark(Step.RECEIVE, 100.0)])
    trace.enter(Step.QUEUED, 100.5)
    trace.enter(Step.PREPARE, 101.0)
    return trace


def row(tokens: int, timings: Timings | None = None, *, choice: int = 0, last: bool = False) -> Row:
    usage = Usage(prompt_tokens=9, completion_tokens=tokens, cached_hot=4, cached_cold=2) if last else None
    return Row(rid="r", seq=0, choice=choice, tokens=tokens, finish="stop" if last else None, usage=usage, timings=timings)


def steps(trace: Trace, now: float) -> list[tuple[str, float]]:
    return [(mark.step.value, took_s) for mark, took_s in trace.spans(now)]


TOLD = [("receive", 0.5), ("queued", 0.5), ("prepare", 1), ("waiting", 2), ("restore", 3), ("prefill", 4)]


def test_the_worker_says_what_came_before_its_first_token_and_so_it_is_told_while_it_decodes() -> None:
    trace = begun()
    trace.accept(Usage(prompt_tokens=9, completion_tokens=0), 103.0)
    assert steps(trace, 104.0)[-1] == ("waiting", 1.0)
    trace.output(row(1, FIRST), 111.0)
    assert steps(trace, 113.0) == [*TOLD, ("decode", 2.0)]
    assert trace.first_token_at == 111.0


def test_the_last_row_says_the_same_and_ends_it() -> None:
    trace = begun()
    trace.output(row(1, FIRST), 111.0)
    trace.output(row(3), 112.0)
    trace.output(row(6, replace(LAST, parks=2), last=True), 116.0)
    trace.end("stop", 116.0)
    assert steps(trace, 999.0) == [*TOLD, ("decode", 5.0)]
    summary = summary_of([trace], 100.0, 999.0)
    assert (summary.total_s, summary.first_token_s) == (16.0, 11.0)
    assert summary.prefill_tokens_per_s == pytest.approx(3 / 4), "six of nine tokens were cached"
    assert summary.parks == 2
    assert summary.decode_tokens_per_s == pytest.approx(5 / 5), "the first token is the prefill's"


def test_a_request_that_was_cancelled_in_the_workers_line_never_computed_anything() -> None:
    trace = begun()
    trace.output(row(0, Timings(prepare_s=1, queued_s=2), last=True), 104.0)
    trace.end("cancelled", 104.0)
    assert steps(trace, 999.0) == [("receive", 0.5), ("queued", 0.5), ("prepare", 1), ("waiting", 2)]
    assert trace.first_token_at is None


def test_what_a_lost_worker_took_is_told_beside_the_second_attempt() -> None:
    trace = begun()
    trace.accept(Usage(prompt_tokens=9, completion_tokens=0), 102.0)
    trace.begin_again()
    trace.enter(Step.QUEUED, 105.0, "again")
    trace.enter(Step.PREPARE, 106.0)
    trace.output(row(1, FIRST), 116.0)
    assert trace.attempts == 2
    assert steps(trace, 116.0)[:5] == [("receive", 0.5), ("queued", 0.5), ("prepare", 1), ("waiting", 3), ("queued", 1)]
    assert trace.spent(116.0)[Step.WAITING] == 3 + 2


def test_what_happens_after_the_end_does_not_change_it() -> None:
    trace = begun()
    trace.note("worker_lost")
    trace.end("cancelled", 102.0)
    trace.output(row(5, LAST), 120.0)
    trace.enter(Step.DECODE, 121.0)
    trace.end("stop", 122.0)
    assert (trace.outcome, trace.over_at, trace.marks[-1].step) == ("worker_lost", 102.0, Step.PREPARE)


def test_of_several_answers_the_slowest_counts_and_the_first_token_of_any() -> None:
    quick, slow = begun(), begun("r.1")
    quick.output(row(1, FIRST), 111.0)
    quick.end("stop", 112.0)
    slow.output(row(1, Timings(prepare_s=1, queued_s=8, prefill_s=4)), 114.0)
    slow.output(row(4, choice=1), 115.0)
    slow.end("stop", 116.0)
    summary = summary_of([quick, slow], 100.0, 999.0)
    assert (summary.spent[Step.WAITING], summary.spent[Step.RESTORE]) == (8, 3)
    assert (summary.total_s, summary.first_token_s) == (16.0, 11.0)
    assert (summary.completion_tokens, summary.decoded_tokens) == (6, 3)


@given(
    st.lists(st.tuples(st.sampled_from(list(Step)), st.floats(0, 10)), max_size=3 * MAX_MARKS),
    st.builds(
        Timings, prepare_s=st.floats(0, 5), queued_s=st.floats(0, 5), restore_s=st.floats(0, 5), prefill_s=st.floats(0, 5)
    ),
)
def test_the_steps_always_add_up_to_the_whole(moves: list[tuple[Step, float]], timings: Timings) -> None:
    trace, now = Trace("r", [Mark(Step.RECEIVE, 0.0)]), 0.0
    for step, wait_s in moves:
        now += wait_s
        trace.enter(step, now)
    assert len(trace.marks) <= MAX_MARKS + len([step for step, _ in moves if step not in (Step.QUEUED, Step.LOAD)])
    assert sum(took_s for _, took_s in trace.spans(now)) == pytest.approx(now)
    trace.enter(Step.PREPARE, now)
    now += timings.prepare_s + timings.queued_s + timings.restore_s + timings.prefill_s
    trace.output(row(1, timings), now)
    trace.end("stop", now)
    assert sum(took_s for _, took_s in trace.spans(now + 5)) == pytest.approx(now)


def test_the_last_thousand_requests_are_remembered_and_no_more_answers_than_fit() -> None:
    records = Records()
    first = records.begin("POST", "/v1/completions", "mine")
    records.handled(first)
    assert records.find("mine") and records.find(first.id) and records.find(f"cmpl-{first.id[4:]}")
    assert not records.find("") and not records.find("req_")
    for _ in range(KEPT):
        records.handled(records.begin("POST", "/", ""))
    assert not records.find("mine")
    big = records.begin("POST", "/", "big")
    for number in range(KEPT_ANSWERS - 1):
        big.answer(str(number)).end("stop", 0.0)
    records.handled(big)
    small = records.begin("POST", "/", "small")
    for number in range(2):
        small.answer(str(number)).end("stop", 0.0)
    records.handled(small)
    assert records.find("small") and not records.find("big")


def test_a_look_at_the_models_pushes_nothing_out() -> None:
    records = Records()
    record = records.begin("GET", "/v1/models", "look")
    records.handled(record)
    assert not records.find("look")
