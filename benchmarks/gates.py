"""Limits that ratios must keep, and how they are printed. Pure."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    what: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def line(self) -> str:
        mark, sign = "ok" if self.holds else "MISSED", "≥" if self.at_least else "≤"
        return f"  {mark:<8}{self.what:<70}{number(self.measured):>8}{self.unit:<3} {sign} {self.limit:g}{self.unit}"


def ratio(part: Iterable[float], whole: Iterable[float]) -> float:
    """The median of part/whole, repeat by repeat: what slowed the machine down meanwhile slowed both."""
    return statistics.median(a / b for a, b in zip(part, whole, strict=True))


def percent(part: Iterable[float], whole: Iterable[float]) -> float:
    return 100 * ratio(part, whole)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
