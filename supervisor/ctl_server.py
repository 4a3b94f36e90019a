"""omlxctl's commands about the server as a whole: serve, status, ps, reload, stop."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import click
import msgspec

from supervisor import ctl_terminal as terminal
from supervisor.client import NotRunning
from supervisor.ctl_exit import CommandFailed
from supervisor.ctl_home import Home, pass_home
from supervisor.instance import running_pid
from supervisor.protocol import ServerStatus, SlotStatus
from supervisor.settings import Leaf, leaves
from supervisor.settings_values import switch

WATCH_S = 1.0
STOP_S = 30.0
"""The server's own shutdown fits in 25 s."""
LOADED = ("loading", "ready", "draining", "stopping", "spawning")
DOWN = ("backoff", "failed")


def flag_of(leaf: Leaf) -> click.Option | None:
    """The option of `omlxctl serve` for one setting; None for those that only the file and the environment set."""
    name = leaf.path.replace(".", "__")
    if leaf.path == "cache.enabled":
        return click.Option(["--no-cache", name], is_flag=True, flag_value=False, default=None, help="keep no KV of prompts")
    if leaf.flag is None:
        return None
    text = leaf.setting.help + (" (repeatable)" if leaf.setting.many else "")
    if leaf.setting.parse is switch:
        return click.Option([f"--{leaf.flag}/--no-{leaf.flag}", name], default=None, help=text)
    if leaf.default not in (None, ()):
        text += f" [default: {leaf.default}]"
    return click.Option([f"--{leaf.flag}", name], multiple=leaf.setting.many, metavar=leaf.key.upper(), help=text)


def given_flags(values: dict[str, object]) -> dict[str, object]:
    """What the command line really said, by key path."""
    return {name.replace("__", "."): value for name, value in values.items() if "__" in name and value not in (None, ())}


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL…]")
@click.option("--home", type=click.Path(path_type=Path), help="directory of this server [default: $OMLX_HOME or ~/.omlxd]")
@pass_home
def serve(here: Home, models: tuple[str, ...], home: Path | None, **flags: object) -> int:
    """Run the server in the foreground until Ctrl-C.

    Each MODEL is loaded at the start; all others are loaded when a request names them. Every flag is also a key of
    settings.json and a variable OMLX_…; a flag wins over the variable, and the variable over the file.
    """
    if home:
        here.given = home
    given = given_flags(flags)
    if models:
        given["model.preload"] = (*cast("tuple[str, ...]", given.get("model.preload", ())), *models)
    loaded = here.load(given)
    from supervisor import daemon  # late: it brings asyncio, which no other command needs

    return daemon.run(loaded)


serve.params.extend(option for leaf in leaves() if (option := flag_of(leaf)))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="everything, as JSON")
@click.option("--watch", "watching", is_flag=True, help="go on until Ctrl-C; with --json one object a line")
@pass_home
def status(here: Home, as_json: bool, watching: bool) -> None:
    """Say whether the server runs, where, and how full its memory is."""
    with here.client() as client:
        while True:
            result = client.call("status")
            if watching and not as_json:
                click.clear()
            _show_status(result, as_json, terminal.print_line if watching else terminal.print_json)
            if not watching:
                return
            sys.stdout.flush()
            time.sleep(WATCH_S)


def _show_status(result: dict[str, object], as_json: bool, print_json: Callable[[object], None]) -> None:
    if as_json:
        return print_json(result)
    server = msgspec.convert(result, ServerStatus)
    loaded = [model.id for model in server.models if model.state == "ready"]
    terminal.print_facts(
        {
            "server": f"omlxd {server.version} (pid {server.pid}), up {terminal.age(server.started)}",
            "address": f"http://{server.host}:{server.port}",
            **({"state": f"restart needed: {server.restart_needed}"} if server.restart_needed else {}),
            "home": server.home,
            **_memory_facts(server),
            "models": _models_fact(server, loaded),
            **{f"cache of {model.id}": model.cache for model in server.models if model.state == "ready"},
            **{child.name: _child(child.state, child.pid, child.restarts) for child in server.children},
        }
    )
    charged = [model for model in server.models if model.charged_bytes]
    if charged:
        click.echo()
        heads = ["MODEL", "GIVEN", "WEIGHTS", "KV", "OF", "HOT CACHE", "OF", "MEASURED", ""]
        terminal.print_table(heads, [_memory(m) for m in charged])
    _warn_of_trouble(server.models)
    for model in server.models:
        if model.slow:
            terminal.warn(f"{model.id} is slow: {model.slow}")
    for warning in server.warnings:
        terminal.warn(warning)
    return None


def _models_fact(server: ServerStatus, loaded: Sequence[str]) -> str:
    if server.models:
        return f"{len(server.models)} known, {len(loaded)} loaded" + (f": {', '.join(loaded)}" if loaded else "")
    from supervisor.catalog import GET_ONE_IN

    return f"none yet; get one in with: {GET_ONE_IN}"


def _memory_facts(server: ServerStatus) -> dict[str, str]:
    size = terminal.size
    facts = {
        "memory": f"{size(server.charged_bytes)} of {size(server.budget_bytes)} given out; "
        f"{size(server.reserve_bytes)} is not for models; measured {size(server.measured_bytes)}",
        "budget": f"{size(server.budget_bytes)}: {server.budget_detail}",
    }
    if server.weights_limit_bytes is not None:
        facts["weights"] = f"{size(server.weights_bytes)} of {size(server.weights_limit_bytes)} (memory.max_model_weights)"
    if server.process_limit_bytes is not None:
        facts["processes"] = f"{size(server.measured_bytes)} of {size(server.process_limit_bytes)} (memory.max_process_memory)"
    if server.missing_bytes:
        facts["missing"] = f"{size(server.missing_bytes)} of models that were unloaded are not back yet"
    if server.pressure != "none":
        facts["pressure"] = f"{server.pressure}: {server.pressure_because}"
    return facts


def _memory(model: SlotStatus) -> list[str]:
    beat = model.beat or {}
    sizes = (
        *(model.charged_bytes, model.weights_bytes, beat.get("kv_bytes"), model.kv_granted_bytes),
        *(beat.get("hot_bytes"), model.hot_granted_bytes, model.measured_bytes),
    )
    notes = ["pinned"] if model.pinned else []
    notes += [f"{beat['parked']} put aside"] if beat.get("parked") else []
    return [model.id, *(terminal.size(cast("int", size)) if size else "-" for size in sizes), ", ".join(notes)]


def _child(state: str, pid: int | None, restarts: int) -> str:
    return state + (f" (pid {pid})" if pid else "") + (f", restarted {restarts} times" if restarts else "")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="everything, as JSON")
@pass_home
def ps(here: Home, as_json: bool) -> None:
    """List the processes: each loaded model, and the server's own."""
    with here.client() as client:
        result = client.call("status")
    server = msgspec.convert(result, ServerStatus)
    live = [model for model in server.models if model.pid or model.state in (*LOADED, *DOWN)]
    if as_json:
        plain = cast("list[dict[str, object]]", result.get("models", []))
        ids = {model.id for model in live}
        return terminal.print_json(
            {"models": [model for model in plain if model["id"] in ids], "children": result.get("children", [])}
        )
    rows = [_row(model) for model in live]
    rows += [[c.name, c.state, str(c.pid or "-"), "-", "-", "-", "-", terminal.age(c.since)] for c in server.children]
    rows.insert(0, ["omlxd", "running", str(server.pid), "-", "-", "-", "-", terminal.age(server.started)])
    terminal.print_table(["NAME", "STATE", "PID", "GIVEN", "MEASURED", "RUNNING", "WAITING", "FOR"], rows)
    _warn_of_trouble(live)
    return None


def _warn_of_trouble(models: Sequence[SlotStatus]) -> None:
    """Which models are down, and why; the lines below the first are what the worker wrote last."""
    for model in models:
        if model.state in DOWN:
            why = model.last_error.strip().splitlines()[0] if model.last_error else "no reason is known"
            terminal.warn(f"{model.id}: {model.state}: {why} (see: omlxctl logs {model.id})")


def _row(model: SlotStatus) -> list[str]:
    state = model.state
    if model.stage and model.state == "loading":
        state += f" {model.stage}" + (f" {model.done / model.total:.0%}" if model.total > 1 else "")
    memory = [terminal.size(n_bytes) if n_bytes else "-" for n_bytes in (model.charged_bytes, model.measured_bytes)]
    return [model.id, state, str(model.pid or "-"), *memory, str(model.leases), str(model.waiting), terminal.age(model.since)]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="the lists of key paths, as JSON")
@pass_home
def reload(here: Home, as_json: bool) -> None:
    """Read settings.json again. A file with errors changes nothing."""
    with here.client() as client:
        result = client.call("reload")
    if as_json:
        return terminal.print_json(result)
    changed, restart = (cast("list[str]", result.get(key, [])) for key in ("changed", "restart"))
    for path in dict.fromkeys([*changed, *restart]):
        click.echo(f"{path}: {'takes effect after: omlxctl restart' if path in restart else 'changed'}")
    if not changed and not restart:
        click.echo("nothing changed")
    return None


@click.command()
@terminal.as_json_option
@pass_home
def stop(here: Home, as_json: bool) -> None:
    """Stop the server; every process is gone when this returns.

    Running answers end with an error, and what is cached is written to disk.
    """
    with here.client() as client:
        pid = client.pid
        with contextlib.suppress(NotRunning):  # it may go before its answer is read
            client.call("stop")
    deadline = time.monotonic() + STOP_S
    while running_pid(here.paths.lock) == pid:
        if time.monotonic() > deadline:
            raise CommandFailed(f"omlxd (pid {pid}) still runs after {STOP_S:.0f} s; to end it by force: kill -9 {pid}")
        time.sleep(0.05)
    terminal.answer({"pid": pid}, as_json, f"omlxd (pid {pid}) has stopped")
