"""omlxctl's commands for an operator in trouble: restart a process or all of them, dump what all of them are doing."""

import time
from typing import cast

import click

from supervisor import ctl_terminal as terminal
from supervisor.client import NoAnswer, NotRunning
from supervisor.ctl_exit import CommandFailed
from supervisor.ctl_home import Home, pass_home

BACK_S = 60.0
"""The server's shutdown takes 25 s at most, its start 2 s."""
LOOK_S = 0.1


@click.command()
@click.argument("name", required=False)
@terminal.as_json_option
@pass_home
def restart(here: Home, name: str | None, as_json: bool) -> None:
    """Start the process NAME again; without NAME the whole server.

    NAME is a model, or gateway, text, janitor. A model finishes its running requests first, for 30 s at most; what comes
    meanwhile waits for the new process. The gateway ends its streams with an error, and models stay loaded. The whole server
    restarts in place, with the command line it was started with: streams end with an error, models are unloaded, port and
    process id stay, connections wait.
    """
    result = _restart_server(here) if name is None else _restart_one(here, name)
    if as_json:
        return terminal.print_json(result)
    click.echo(f"{name or 'omlxd'} is started again (pid {result.get('pid')})")
    return None


def _restart_one(here: Home, name: str) -> dict[str, object]:
    with here.client() as client:
        return client.call("restart", {"name": name}, timeout_s=None)


def _restart_server(here: Home) -> dict[str, object]:
    with here.client() as client:
        before = client.call("status")["started"]
        client.call("restart")
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        try:
            with here.client() as client:
                status = client.call("status")
        except NoAnswer:
            continue  # it is between its two lives
        except NotRunning as e:
            raise CommandFailed("omlxd has ended and did not come back; for why see: omlxctl logs omlxd") from e
        children = cast("list[dict[str, object]]", status["children"])
        if status["started"] != before and all(child["state"] == "running" for child in children):
            return {"pid": status["pid"], "version": status["version"], "host": status["host"], "port": status["port"]}
    raise CommandFailed(f"omlxd did not come back within {BACK_S:.0f} s; see: omlxctl logs omlxd")


@click.command()
@terminal.as_json_option
@pass_home
def dump(here: Home, as_json: bool) -> None:
    """Print the server's whole state as JSON, and log all stacks.

    Every process writes what it is doing into its log: omlxctl logs NAME.
    """
    with here.client() as client:
        result = client.call("dump")
    terminal.print_json(result)
    click.echo(f"stacks are in the logs of: {', '.join(map(str, _names(result.get('stacks_in_logs'))))}", err=True)


def _names(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # JSON
