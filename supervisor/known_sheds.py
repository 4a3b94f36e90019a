"""Models that died with their optional features, kept between runs in `state/shed.json`: a new server must not try them again.

An entry holds for one load key and one build: other files, load settings or another version of the server, and it is as if
nothing had happened.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from supervisor import state_file
from supervisor.build import build
from supervisor.slot_events import ModelCost, RememberShed


class Shed(msgspec.Struct, frozen=True):
    load_key: str
    build: str


class KnownSheds:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._sheds = state_file.read(path, dict[str, Shed]) or {}

    def added_to(self, costs: Iterable[ModelCost]) -> tuple[ModelCost, ...]:
        return tuple(replace(cost, known_shed=self._sheds.get(cost.model) == Shed(cost.load_key, build())) for cost in costs)

    def note(self, said: RememberShed) -> None:
        if said.shed:
            self._sheds[said.model] = Shed(said.load_key, build())
        elif self._sheds.pop(said.model, None) is None:
            return
        state_file.write(self._path, self._sheds)
