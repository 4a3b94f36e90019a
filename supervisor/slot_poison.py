"""Requests that may kill workers: who was on a worker when it died, and who died there alone.

After a death everyone who was on the worker is suspected and retries alone. A suspect that completes is cleared; one whose
worker dies again with nobody else on it is condemned. A first death is nobody's proven fault, also when only one was there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SUSPECTS = 1024
POISON_MESSAGE = "this request ended its worker more than once, the last time with no other request on it"


class Verdict(StrEnum):
    CLEAR = "clear"
    ALONE = "alone"
    POISON = "poison"


@dataclass(frozen=True, slots=True)
class _Record:
    deaths: int
    condemned: bool
    at: float


class Suspects:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._records: dict[tuple[str, str], _Record] = {}

    def verdict(self, model: str, request_hash: str, now: float) -> Verdict:
        record = self._records.get((model, request_hash))
        if record is None or now - record.at >= self._keep_s:
            return Verdict.CLEAR
        return Verdict.POISON if record.condemned else Verdict.ALONE

    def deaths(self, model: str, request_hash: str) -> int:
        record = self._records.get((model, request_hash))
        return record.deaths if record is not None else 0

    def died(self, model: str, request_hash: str, alone: bool, now: float) -> None:
        if not request_hash:
            return
        key = (model, request_hash)
        deaths = self.deaths(model, request_hash) + 1
        self._records.pop(key, None)
        self._records[key] = _Record(deaths, condemned=alone, at=now)
        if len(self._records) > MAX_SUSPECTS:
            del self._records[next(iter(self._records))]

    def survived(self, model: str, request_hash: str) -> None:
        self._records.pop((model, request_hash), None)

    def forget(self, model: str) -> None:
        self._records = {key: record for key, record in self._records.items() if key[0] != model}
