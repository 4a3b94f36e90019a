"""How `omlxctl cache` puts its findings: tables and sentences for a person. Decides nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from supervisor import ctl_terminal as terminal

if TYPE_CHECKING:
    from cachestore.verify import Verified

Json = dict[str, object]

_KINDS = {
    "block": "blocks",
    "bad": "damaged blocks",
    "temporary": "old temporaries",
    "stale_format": "files of an older format",
    "empty_namespace": "empty namespaces",
}
_MISSES = {"absent": "not there", "bad": "damaged", "known_bad": "known to be damaged", "unreadable": "not readable"}
_DROPS = {"credit": "no credit", "queue_full": "the disk is too slow", "failed": "the write failed", "read_only": "read-only"}


def stats(root: Path, server: Json | None, namespaces: Sequence[Json]) -> None:
    workers = cast("list[Json]", server["workers"]) if server else []
    terminal.print_facts(_store_facts(root, server, sum(_int(found, "bytes") for found in namespaces)))
    if namespaces:
        click.echo()
        rows = [_row(found, workers) for found in namespaces]
        terminal.print_table(["MODEL", "BLOCKS", "SNAPSHOTS", "ON DISK", "LAST USE", "OLDEST USE", "RUNS"], rows)
    for worker in workers:
        click.echo()
        _worker(worker)


def verified(root: Path, reports: "Sequence[Verified]") -> None:
    if not reports:
        click.echo(f"nothing is cached in {root}")
    for report in reports:
        sound = f"{report.blocks} blocks and {report.snapshots} snapshots are sound ({terminal.size(report.bytes)})"
        lost = f"; {report.unreachable} of them of no use, as a block before them is gone" if report.unreachable else ""
        click.echo(f"{report.model}: {sound}{lost}")
        for bad in report.bad:
            click.echo(f"  {bad.path}: {bad.reason}")
    if bad_files := sum(len(report.bad) for report in reports):
        click.echo(f"{bad_files} damaged; each is a miss when it is asked for, and set aside then")


def deleted(report: Json, *, dry_run: bool) -> None:
    counts = cast("Mapping[str, int]", report.get("deleted_files") or {})
    named = [f"{count} {_KINDS.get(kind, kind)}" for kind, count in counts.items() if count]
    if not named:
        click.echo("nothing to delete")
        return
    verb = "would delete" if dry_run else "deleted"
    click.echo(f"{verb} {', '.join(named)}: {terminal.size(_int(report, 'deleted_bytes'))}")


def _store_facts(root: Path, server: Json | None, used_bytes: int) -> dict[str, str]:
    if server is None:
        return {"store": str(root), "on disk": terminal.size(used_bytes), "server": "not running"}
    gone_bytes, gone_files = _int(server, "deleted_bytes"), _int(server, "deleted_files")
    return {
        "store": f"{root} ({server['state']})",
        "on disk": f"{terminal.size(used_bytes)}, at most {terminal.size(_int(server, 'cap_bytes'))}",
        "credit": f"{terminal.size(_int(server, 'available_bytes'))} left to grant to writers",
        "janitor": f"deleted {gone_files} files ({terminal.size(gone_bytes)}) since the server started",
    }


def _row(found: Json, workers: Sequence[Json]) -> list[str]:
    runs = any(worker["namespace"] == found["name"] for worker in workers)
    oldest, newest = (terminal.age(cast("float", found[key])) for key in ("oldest_use", "newest_use"))
    counts = [str(_int(found, key)) for key in ("blocks", "snapshots")]
    return [str(found["model"]), *counts, terminal.size(_int(found, "bytes")), newest, oldest, "yes" if runs else "-"]


def _worker(worker: Json) -> None:
    counters = cast("Mapping[str, int]", worker["counters"])
    hot, cold, asked = (counters.get(key, 0) for key in ("hot_tokens", "cold_tokens", "asked_tokens"))
    share = f"{(hot + cold) / asked:.0%}" if asked else "none"
    facts = {
        "hits": f"{share} of {asked} prompt tokens: {hot} from RAM, {cold} from disk",
        "misses": _listed(counters, "miss_", _MISSES),
        "not written": _listed(counters, "drop_", _DROPS),
        "written": f"{terminal.size(_int(worker, 'written_bytes'))}, {_rate(worker)} in the last minute",
        "in RAM": terminal.size(_int(worker, "hot_bytes")),
    }
    if damaged := _listed(counters, "bad_", {}):
        facts["damaged"] = damaged
    if blocks := counters.get("cold_hits", 0):
        facts["restore"] = f"{counters.get('read_us', 0) / blocks / 1000:.2f} ms per block read from disk"
    if worker["credit_bytes"] is not None:
        facts["credit"] = (
            f"{terminal.size(_int(worker, 'credit_bytes'))} left of {terminal.size(_int(worker, 'granted_bytes'))}"
        )
    if worker["trouble"]:
        facts["trouble"] = str(worker["trouble"])
    click.echo(str(worker["model"]))
    terminal.print_facts({f"  {name}": value for name, value in facts.items() if value})


def _rate(worker: Json) -> str:
    return f"{terminal.size(cast('float', worker['write_rate_bytes_s']))}/s"


def _listed(counters: Mapping[str, int], prefix: str, words: Mapping[str, str]) -> str:
    found = {key.removeprefix(prefix): count for key, count in counters.items() if key.startswith(prefix) and count}
    return ", ".join(f"{count} {words.get(reason, reason.replace('_', ' '))}" for reason, count in found.items())


def _int(of: Json, key: str) -> int:
    value = of.get(key)
    return value if isinstance(value, int) else 0
