"""How omlxctl writes to a terminal: tables, sizes, durations, JSON and one line of progress.

Progress and colours appear on a terminal only; what goes into a pipe or a file is plain lines.
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

import click

REDRAW_S = 0.1
BAR_CELLS = 24


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


as_json_option = click.option("--json", "as_json", is_flag=True, help="the answer as JSON")


def answer(result: Mapping[str, object], as_json: bool, text: str) -> None:
    """How most commands end: the whole answer for a program, a sentence for a person."""
    if as_json:
        print_json(result)
    else:
        click.echo(text)


def print_line(value: object) -> None:
    """One JSON object on a line of its own, for what goes on and on."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]
    click.secho("  ".join(h.ljust(w) for h, w in zip(headings, widths, strict=True)).rstrip(), bold=True)
    for row in rows:
        click.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Mapping[str, str]) -> None:
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        click.echo(f"{name.ljust(width)}  {value}")


def warn(text: str) -> None:
    click.secho(f"warning: {text}", fg="yellow", err=True)


def size(n_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def age(since: float | None) -> str:
    """How long ago, from a Unix time: `3 min`."""
    if not since:
        return "-"
    seconds = max(0.0, time.time() - since)
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


class Progress:
    """What a slow step is at, on stderr: one line redrawn in place on a terminal, one line per stage elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = sys.stderr.isatty()
        self._stage = ""
        self._drawn_at = 0.0

    def show(self, stage: str, done: int = 0, total: int = 0) -> None:
        new_stage = stage != self._stage
        self._stage = stage
        if not self._live:
            if new_stage:
                click.echo(f"{self._what}: {stage}", err=True)
            return
        now = time.monotonic()
        if new_stage or done == total or now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._draw(f"{self._what}: {stage}{_bar(done, total)}")

    def end(self) -> None:
        if self._live:
            self._draw("")

    def _draw(self, line: str) -> None:
        click.echo(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", nl=False, err=True)


def _bar(done: int, total: int) -> str:
    if total <= 1:
        return " …"
    share = min(1.0, done / total)
    full = int(share * BAR_CELLS)
    return f" [{'#' * full}{'.' * (BAR_CELLS - full)}] {share:4.0%}"
