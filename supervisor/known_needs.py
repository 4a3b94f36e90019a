"""What models proved to need beyond what their files say, kept between runs in `state/models.json`. It can be thrown away.

An entry holds for one load key: other files or load settings, and it is as if nothing were known.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from supervisor import state_file
from supervisor.slot_events import ModelCost, Remember


class Need(msgspec.Struct, frozen=True):
    load_key: str
    need_bytes: int


class KnownNeeds:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._needs = state_file.read(path, dict[str, Need]) or {}

    def added_to(self, costs: Iterable[ModelCost]) -> tuple[ModelCost, ...]:
        return tuple(self._added_to(cost) for cost in costs)

    def _added_to(self, cost: ModelCost) -> ModelCost:
        bare = None if cost.without is None else self._added_to(cost.without)
        return replace(cost, known_bytes=self._of(cost), without=bare)

    def _of(self, cost: ModelCost) -> int:
        need = self._needs.get(cost.model)
        return need.need_bytes if need is not None and need.load_key == cost.load_key else 0

    def note(self, said: Remember) -> None:
        if said.need_bytes:
            self._needs[said.model] = Need(said.load_key, said.need_bytes)
        else:
            self._needs.pop(said.model, None)
        state_file.write(self._path, self._needs)
