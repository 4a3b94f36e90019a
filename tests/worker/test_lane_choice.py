"""Which rows share a batch, what a prompt's chunk may be, who goes first and who has memory: the pure rules, case by case."""

import pytest

from supervisor.protocol import Sampling
from tests.stands.sink import ForcedText
from worker.admission import Admission, Claim, KvCost, KvTooLarge
from worker.job import Job
from worker.lane_choice import LaneView, choose_lane, choose_merge, is_dense, row_tokens
from worker.lanes import Chunks
from worker.line import AGING_S, Line
from worker.pace import Pace, sizes_of
from worker.sequence import Sequence

CHUNKS = Chunks(idle_tokens=256, busy_tokens=128, block_tokens=64)


def view(*lengths: int, constrained: bool = False, takes_one: bool = True) -> LaneView:
    return LaneView(lengths, constrained, takes_one)


def choice(lanes: list[LaneView], length: int, *, constrained: bool = False, may_open: bool = True) -> int | None:
    return choose_lane(lanes, length, is_constrained=constrained, may_open=may_open)


def test_a_long_row_and_seven_short_ones_take_two_lanes() -> None:
    lanes: list[list[int]] = []
    for length in (4000, *[50] * 7):
        at = choice([view(*lane) for lane in lanes], length)
        assert at is not None
        if at == len(lanes):
            lanes.append([])
        lanes[at].append(length)
    assert lanes == [[4000], [50] * 7]
    padded = sum(len(lane) * max(map(row_tokens, lane)) for lane in lanes)
    assert padded <= 1.6 * (4000 + 7 * 50) * 1.5, "with room to grow"


def test_alike_rows_share_a_lane_and_small_differences_do_not_count() -> None:
    assert choice([view(5, 300), view()], 131) == 0
    assert is_dense([20] * 7 + [250])
    assert not is_dense([4000, 50])


def test_a_lane_that_prefills_or_is_full_is_not_joined() -> None:
    assert choice([view(50, takes_one=False)], 60) == 1
    assert choice([view(50, takes_one=False)], 60, may_open=False) is None


def test_a_grammar_keeps_to_its_own_lane_while_there_is_a_choice() -> None:
    lanes = [view(50), view(60, constrained=True)]
    assert choice(lanes, 55, constrained=True) == 1
    assert choice(lanes, 55) == 0
    assert choice(lanes[:1], 55, constrained=True) == 1
    assert choice(lanes[:1], 55, constrained=True, may_open=False) == 0


def test_where_no_lane_suits_and_none_can_be_opened_the_cheapest_is_joined() -> None:
    assert choice([view(20_000), view(8_000, 8_000)], 100_000, may_open=False) == 0


def test_lanes_become_one_when_their_rows_have_become_alike() -> None:
    assert choose_merge([view(50), view(70, 80)]) == (1, 0)
    assert choose_merge([view(50), view(4000)]) is None
    assert choose_merge([view(50), view(70, takes_one=False)]) is None
    assert choose_merge([view(50), view(70, constrained=True)]) is None
    assert choose_merge([view(50), view()]) is None


def paced(max_gap_s: float, *, token_s: float, decode_s: float) -> int:
    pace = Pace(CHUNKS, max_gap_s)
    for _ in range(20):
        pace.note(decoded=True, prefill_tokens=0, took_s=decode_s)
        pace.note(decoded=True, prefill_tokens=64, took_s=decode_s + 64 * token_s)
    assert pace.chunk_tokens(someone_decodes=False) == 256
    return pace.chunk_tokens(someone_decodes=True)


def test_a_chunk_is_as_large_as_the_gap_allows() -> None:
    assert paced(0.3, token_s=0.001, decode_s=0.01) == 128
    assert paced(0.1, token_s=0.001, decode_s=0.01) == 64
    assert paced(0.03, token_s=0.001, decode_s=0.001) == 16


def test_a_prompt_gets_on_although_a_slow_machine_cannot_keep_the_gap() -> None:
    assert paced(0.3, token_s=0.0055, decode_s=0.15) == 128


def test_chunks_suit_their_blocks() -> None:
    assert sizes_of(CHUNKS) == (16, 32, 64, 128)
    assert sizes_of(Chunks(2048, 512, 256)) == (16, 32, 64, 128, 256, 512)
    assert sizes_of(Chunks(192, 96, 48)) == (24, 48, 96)


def waiting(rid: str, priority: int = 0) -> Sequence:
    job = Job(rid, (1, 2), Sampling(), 1, priority=priority)
    return Sequence(job, 0, ForcedText().stream((), ()), frozenset(), None)


def test_the_line_is_in_order_of_priority_then_arrival_and_age_overtakes_priority() -> None:
    line = Line()
    old = waiting("old")
    line.join(old, 0.0)
    line.join(waiting("later"), 1.0)
    line.join(waiting("urgent", 1), 2.0)
    line.join(waiting("too late", 1), AGING_S + 1.5)
    assert [sequence.job.rid for sequence in line] == ["urgent", "old", "later", "too late"]
    line.take(old, 2.0)
    assert [s.job.rid for s in line.leave({"later", "nobody"})] == ["later"]
    assert [sequence.job.rid for sequence in line] == ["urgent", "too late"]


def test_memory_is_counted_with_copies_windows_and_a_bounded_answer() -> None:
    admission = Admission(KvCost(((100, None), (10, 256))), granted_bytes=1_000_000, ceiling_bytes=2_000_000)
    assert admission.needed_bytes([Claim(100, 100)]) == 2 * (512 * 100 + 256 * 10)
    assert Claim(100, 50_000).tokens == 1124
    assert Claim(100, 50_000, held_tokens=3000).tokens == 3000
    assert admission.fits([Claim(1000, 100)] * 3)
    assert not admission.fits([Claim(1000, 100)] * 4)
    assert Admission(KvCost(((100, None),)), 0, 0).fits([Claim(10**9, 1)])
    stateful = Admission(KvCost(((100, None),), state_bytes=7_000), 0, 0)
    assert stateful.needed_bytes([Claim(100, 100)] * 2) == 2 * (2 * (512 * 100 + 7_000) + 7_000), "and a copy that may be kept"
    admission.check(Claim(9_000, 100))
    with pytest.raises(KvTooLarge, match=r"10100 tokens .* 1 MiB"):
        admission.check(Claim(10_000, 100))
