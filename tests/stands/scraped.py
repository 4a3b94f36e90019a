"""What `GET /metrics` said, read by Prometheus' own parser."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """`scrape["omlxd_x", "a", "b"]` is the sample of that name with these label values, in any order."""

    def __init__(self, text: str) -> None:
        self.families = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
        self._samples: dict[tuple[str, frozenset[str]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.values())
                assert key not in self._samples, f"{key} is there twice"
                self._samples[key] = sample.value

    def __getitem__(self, wanted: str | tuple[str, ...]) -> float:
        name, *labels = (wanted,) if isinstance(wanted, str) else wanted
        return self._samples[name, frozenset(labels)]

    def has(self, name: str, *labels: str) -> bool:
        return (name, frozenset(labels)) in self._samples
