"""What models proved to need beyond what their files say, kept between runs in `state/models.json`. It can be thrown away.

An entry holds for one load key: other files or load settings, and it is as if nothing were known.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from supervisor.slot_events import ModelCost, Remember

log = logging.getLogger("memory")


class Need(msgspec.Struct, frozen=True):
    load_key: str
    need_bytes: int


class KnownNeeds:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._needs: dict[str, Need] = {}
        try:
            self._needs = msgspec.json.decode(path.read_bytes(), type=dict[str, Need])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as e:
            log.warning("%s cannot be read and is begun anew: %s", path, e)

    def added_to(self, costs: Iterable[ModelCost]) -> tuple[ModelCost, ...]:
        return tuple(replace(cost, known_bytes=self._of(cost)) for cost in costs)

    def _of(self, cost: ModelCost) -> int:
        need = self._needs.get(cost.model)
        return need.need_bytes if need is not None and need.load_key == cost.load_key else 0

    def note(self, said: Remember) -> None:
        """What cannot be written is only forgotten sooner."""
        if said.need_bytes:
            self._needs[said.model] = Need(said.load_key, said.need_bytes)
        else:
            self._needs.pop(said.model, None)
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(msgspec.json.encode(self._needs))
            unfinished.replace(self._path)
        except OSError as e:
            log.warning("%s cannot be written: %s", self._path, e)
