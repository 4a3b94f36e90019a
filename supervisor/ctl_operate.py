"""omlxctl's commands for an operator in trouble: restart one process, dump what all of them are doing."""

import click

from supervisor import ctl_terminal as terminal
from supervisor.ctl_home import Home, pass_home


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="the answer as JSON")
@pass_home
def restart(here: Home, name: str, as_json: bool) -> None:
    """Start the process NAME again: a model, or gateway, text, janitor.

    A model finishes its running requests first, for 30 s at most; what comes meanwhile waits for the new process. The gateway
    ends its streams with an error, and models stay loaded. The whole server: omlxctl stop, then serve or service start.
    """
    with here.client() as client:
        result = client.call("restart", {"name": name}, timeout_s=None)
    if as_json:
        return terminal.print_json(result)
    click.echo(f"{name} is started again (pid {result.get('pid')})")
    return None


@click.command()
@pass_home
def dump(here: Home) -> None:
    """Print the server's whole state as JSON; every process writes its stacks into its log (omlxctl logs NAME)."""
    with here.client() as client:
        result = client.call("dump")
    terminal.print_json(result)
    click.echo(f"stacks are in the logs of: {', '.join(map(str, _names(result.get('stacks_in_logs'))))}", err=True)


def _names(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # JSON
