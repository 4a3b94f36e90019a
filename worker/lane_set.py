"""All lanes of an engine and the sequences in them: who joins which, whose turn it is to be prefilled, which lanes become one.

Lanes are opened as they are needed and kept. Lives on the engine thread; must not know rows or the prefix cache.
"""

from collections.abc import Callable, Collection, Iterator

from worker.controls import Controls
from worker.lane_choice import LaneView, choose_lane, choose_merge
from worker.lanes import Lane
from worker.mlx_types import Cache
from worker.sequence import Sequence
from worker.serial_lane import SerialLane

AnyLane = Lane | SerialLane
MAX_LANES = 4
MAX_PREFILLS = 2
"""A long prompt and one that is much shorter; more would only share the same device."""


class LaneSet:
    def __init__(self, new_lane: Callable[[], AnyLane]) -> None:
        self._new_lane = new_lane
        first = new_lane()
        self.chunks = first.chunks
        self.max_rows = first.max_rows
        self._max_lanes, self.max_prefills = (MAX_LANES, MAX_PREFILLS) if isinstance(first, Lane) else (1, 1)
        self._live: dict[AnyLane, dict[int, Sequence]] = {first: {}}
        self._served_last: AnyLane | None = None

    def __iter__(self) -> Iterator[AnyLane]:
        """Those with sequences; safe against changes meanwhile."""
        return iter([lane for lane, live in self._live.items() if live])

    @property
    def rows(self) -> int:
        return sum(map(len, self._live.values()))

    @property
    def has_room(self) -> bool:
        return self.rows < self.max_rows

    @property
    def cache_bytes(self) -> int:
        return sum(lane.cache_bytes for lane in self._live)

    @property
    def draft_counts(self) -> dict[str, int]:
        lane = next(iter(self._live))
        return lane.draft_counts if isinstance(lane, SerialLane) else {}

    @property
    def decodes(self) -> bool:
        return any(lane.rows > lane.is_prefilling for lane in self._live)

    def live(self, lane: AnyLane) -> dict[int, Sequence]:
        return self._live[lane]

    def sequences(self) -> list[Sequence]:
        return [sequence for live in self._live.values() for sequence in live.values()]

    def place(self, sequence: Sequence) -> AnyLane | None:
        """The lane that it should be inserted into; None while there is none."""
        lanes = list(self._live)
        views = [self._view(lane) for lane in lanes]
        may_open = len(lanes) < self._max_lanes
        is_constrained = sequence.job.matcher is not None
        choice = choose_lane(views, len(sequence.tokens), is_constrained=is_constrained, may_open=may_open)
        if choice is None:
            return None
        if choice == len(lanes):
            lanes.append(self._new_lane())
            self._live[lanes[choice]] = {}
        return lanes[choice]

    def insert(self, sequence: Sequence, cached_tokens: int, cache: Cache, controls: Controls, edge: int) -> None:
        """Only where `place` has found room. As `Lane.insert`."""
        lane = self.place(sequence)
        assert lane is not None, "nothing else is let in while a sequence is on its way"
        uid = lane.insert(sequence.tokens, cached_tokens, cache, controls.sampler, controls.processors, edge)
        self._live[lane][uid] = sequence

    def merge(self) -> None:
        """Makes one lane of two whose rows have become alike: one step is cheaper than two."""
        lanes = list(self)
        pair = choose_merge([self._view(lane) for lane in lanes]) if len(lanes) > 1 else None
        if pair is None:
            return
        into, emptied = lanes[pair[0]], lanes[pair[1]]
        if isinstance(into, Lane) and isinstance(emptied, Lane):
            into.absorb(emptied)
            self._live[into] |= self._live[emptied]
            self._live[emptied] = {}

    def prefilling(self) -> list[tuple[AnyLane, Sequence]]:
        """Whose turn it is comes first: they take turns."""
        lanes = sorted((lane for lane in self if lane.is_prefilling), key=lambda lane: lane is self._served_last)
        return [(lane, self._live[lane][lane.prefilling_uid]) for lane in lanes]

    def served(self, lane: AnyLane) -> None:
        self._served_last = lane

    def take_out(self, lane: AnyLane, uids: list[int]) -> list[Sequence]:
        if uids:
            lane.remove(uids)
        return [self._live[lane].pop(uid) for uid in uids]

    def leave(self, rids: set[str]) -> list[Sequence]:
        """Takes the sequences of those requests out."""
        gone = [sequence for sequence in self.sequences() if sequence.job.rid in rids]
        self.remove(gone)
        return gone

    def remove(self, sequences: Collection[Sequence]) -> None:
        for lane in self:
            self.take_out(lane, [uid for uid, sequence in self._live[lane].items() if sequence in sequences])

    def close(self, lane: AnyLane) -> list[Sequence]:
        """The lane is undefined after an error: nothing can be saved of it."""
        lane.close()
        gone = list(self._live.pop(lane).values())
        if not self._live:
            self._live[self._new_lane()] = {}
        return gone

    def _view(self, lane: AnyLane) -> LaneView:
        live = self._live[lane].values()
        lengths = tuple(len(sequence.tokens) for sequence in live)
        is_constrained = any(sequence.job.matcher is not None for sequence in live)
        return LaneView(lengths, is_constrained, lane.has_room and not lane.is_prefilling)
