"""Which lane a newcomer joins, and which lanes may become one: padding decides, as every row of a batch costs as much as the
longest.

4000 tokens beside seven times 50 in one batch hold 7.8 times the bytes, and a step takes seven times as long.
Pure: lengths in, choices out; must not know MLX or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STEP_TOKENS = 256
"""mlx_lm's caches grow by this much; shorter differences cost nothing."""
MAX_PADDING = 1.5
"""Of a batch's rows all padded to the longest, to their sum."""


@dataclass(frozen=True, slots=True)
class LaneView:
    lengths: tuple[int, ...]
    """Tokens of each row, its whole prompt included."""
    is_constrained: bool
    """Its rows follow a grammar and wait for the host at every step."""
    takes_one: bool
    """It has room, and no prompt is being prefilled in it."""


def row_tokens(length: int) -> int:
    """What a row of that many tokens will hold soon."""
    return -(-(length + STEP_TOKENS) // STEP_TOKENS) * STEP_TOKENS


def is_dense(lengths: Sequence[int]) -> bool:
    rows = [row_tokens(length) for length in lengths]
    return len(rows) * max(rows, default=0) <= MAX_PADDING * sum(rows)


def choose_lane(lanes: Sequence[LaneView], length: int, *, is_constrained: bool, may_open: bool) -> int | None:
    """Index of the lane to join; `len(lanes)` to open another; None to wait. Like joins like as long as there is a choice."""
    open_lanes = [i for i, lane in enumerate(lanes) if lane.takes_one]
    alike = [i for i in open_lanes if lanes[i].lengths and lanes[i].is_constrained == is_constrained]
    dense = [i for i in alike if is_dense((*lanes[i].lengths, length))]
    if dense:
        return min(dense, key=lambda i: _added(lanes[i], length))
    empty = next((i for i in open_lanes if not lanes[i].lengths), None)
    if empty is not None:
        return empty
    if may_open:
        return len(lanes)
    return min(alike or open_lanes, key=lambda i: _added(lanes[i], length), default=None)


def choose_merge(lanes: Sequence[LaneView]) -> tuple[int, int] | None:
    """Two lanes whose rows can share a batch: one step for both is cheaper than two. The second joins the first."""
    settled = [i for i, lane in enumerate(lanes) if lane.lengths and lane.takes_one]
    for at, i in enumerate(settled):
        for j in settled[at + 1 :]:
            lengths = (*lanes[i].lengths, *lanes[j].lengths)
            if lanes[i].is_constrained == lanes[j].is_constrained and is_dense(lengths):
                return (i, j) if len(lanes[i].lengths) >= len(lanes[j].lengths) else (j, i)
    return None


def _added(lane: LaneView, length: int) -> int:
    """Tokens by which the batch grows."""
    rows = [row_tokens(own) for own in lane.lengths]
    before = len(rows) * max(rows, default=0)
    return (len(rows) + 1) * max([*rows, row_tokens(length)]) - before
