"""omlxctl cache: what the block store holds and did, and the few things a person may do to it.

The files are looked at here, with or without a server; deleting is the janitor's work while there is one. The store's own
package is imported late, for these commands alone.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from supervisor import ctl_cache_show as show
from supervisor import ctl_terminal as terminal
from supervisor.client import CallFailed, ControlClient
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.protocol import Code

if TYPE_CHECKING:
    from cachestore.sweep import Policy, Report
    from cachestore.verify import Stats, Verified

Json = dict[str, object]


@click.group()
def cache() -> None:
    """Look after the KV blocks kept on disk.

    All but `explain` also work while no server runs.
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="everything, as JSON")
@pass_home
def stats(here: Home, as_json: bool) -> None:
    """Say what is cached per model, and what came of it."""
    namespaces = [asdict(found) for found in _stats(here.paths.cache)]
    server = here.either(_server_stats, _no_server)
    if as_json:
        terminal.print_json({"dir": str(here.paths.cache), "server": server, "namespaces": namespaces})
    else:
        show.stats(here.paths.cache, server, namespaces)


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="the report, as JSON")
@pass_home
def verify(here: Home, as_json: bool) -> int:
    """Read every block and check that it is sound. Changes nothing."""
    from cachestore.verify import verify as check

    root = here.paths.cache
    if not _there(root):
        reports = list["Verified"]()
    else:
        progress = terminal.Progress(f"reading {root}")
        reports = check(root, lambda done, total: progress.show("blocks", done, total))
        progress.end()
    if as_json:
        terminal.print_json({"dir": str(root), "namespaces": [_plain(report) for report in reports]})
    else:
        show.verified(root, reports)
    return Exit.FAILED if any(report.bad for report in reports) else Exit.DONE


@cache.command()
@click.option("--dry-run", is_flag=True, help="delete nothing, say what would be")
@click.option("--json", "as_json", is_flag=True, help="the report, as JSON")
@pass_home
def gc(here: Home, dry_run: bool, as_json: bool) -> None:
    """Delete what is too much, too old or left over.

    Over the cap, of an older format, or left over: what the janitor does by itself, now.
    """
    from cachestore.sweep import run_pass

    report = _by_janitor(
        here, "cache_gc", {"dry_run": dry_run}, lambda: run_pass(here.paths.cache, _policy(here), dry_run=dry_run)
    )
    _print_deleted(here.paths.cache, report, as_json=as_json, dry_run=dry_run)


@cache.command()
@click.argument("model", required=False)
@click.option("--yes", is_flag=True, help="do not ask")
@click.option("--json", "as_json", is_flag=True, help="the report, as JSON")
@pass_home
def clear(here: Home, model: str | None, yes: bool, as_json: bool) -> None:
    """Delete the blocks of MODEL, or of all models. Running answers go on; what a worker holds in RAM stays there."""
    from cachestore.namespaces import of_model
    from cachestore.sweep import clear as delete

    root = here.paths.cache
    if model is not None and not of_model(root, model):
        raise CommandFailed(f"nothing of {model} is cached in {root}", Exit.NOT_FOUND)
    if not yes:
        _confirm(f"Delete the cached blocks of {model or 'all models'} in {root}?")
    report = _by_janitor(here, "cache_clear", {"model": model}, lambda: delete(root, model))
    _print_deleted(root, report, as_json=as_json, dry_run=False)


@cache.command()
@click.argument("request_id", metavar="RID")
@terminal.as_json_option
@pass_home
def explain(here: Home, request_id: str, as_json: bool) -> None:
    """Say where the prompt of a request left what was cached. RID is the answer's x-request-id."""
    with here.client() as client:
        result = client.call("cache_explain", {"rid": request_id})
    terminal.answer(result, as_json, "\n".join(cast("list[str]", result.get("lines", []))))


def _plain(report: "Verified") -> Json:
    return {**asdict(report), "bad": [{"path": str(bad.path), "reason": bad.reason} for bad in report.bad]}


def _stats(root: Path) -> "list[Stats]":
    from cachestore.verify import stats

    return stats(root) if _there(root) else []


def _there(root: Path) -> bool:
    """False for a store that no worker has made yet. Raises CommandFailed for what is no store of ours."""
    from cachestore.tree import is_marked

    if is_marked(root):
        return True
    if root.exists() and any(root.iterdir()):
        raise _foreign(root)
    return False


def _foreign(root: Path) -> CommandFailed:
    return CommandFailed(f"{root} holds something else than the cache (no marker file): it is left alone", Exit.REFUSED)


def _server_stats(client: ControlClient) -> Json | None:
    return client.call("cache_stats")


def _no_server() -> Json | None:
    return None


def _policy(here: Home) -> "Policy":
    from cachestore.sweep import Policy
    from supervisor.store_limits import store_limits

    limits = store_limits(here.loaded.settings, here.paths)
    return Policy(limits.high_bytes, limits.min_free_bytes)


def _by_janitor(here: Home, verb: str, args: Json, without: "Callable[[], Report]") -> Json:
    """The janitor's report when a server has one, else of the same work done here."""

    def ask(client: ControlClient) -> Json:
        try:
            return client.call(verb, args, timeout_s=None)
        except CallFailed as e:
            if e.code == Code.BUSY:  # a server without a cache has no janitor
                return without().plain()
            raise

    return here.either(ask, lambda: without().plain())


def _print_deleted(root: Path, report: Json, *, as_json: bool, dry_run: bool) -> None:
    state = report.get("state")
    if state == "not_ours":
        raise _foreign(root)
    if state not in ("ok", "missing"):
        raise CommandFailed(f"{root}: {state}")
    if as_json:
        terminal.print_json(report)
    else:
        show.deleted(report, dry_run=dry_run)
    if report.get("failed_files"):
        raise CommandFailed(f"{report['failed_files']} files could not be deleted", answered=as_json)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed("there is nobody to ask; say --yes", Exit.USAGE)
    click.confirm(question, abort=True)
