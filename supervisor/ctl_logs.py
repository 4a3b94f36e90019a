"""`omlxctl logs`: what a process of the server printed, from the server's memory, or from its file when no server runs."""

from pathlib import Path
from typing import cast

import click

from supervisor import ctl_terminal as terminal
from supervisor.client import SHORT_S
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.logs import log_file


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="go on printing until Ctrl-C")
@click.option("-n", "--lines", default=200, show_default=True, type=click.IntRange(0), help="how many of the last lines")
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line")
@pass_home
def logs(here: Home, name: str, follow: bool, lines: int, as_json: bool) -> None:
    """Print the log of NAME: a model, or omlxd, gateway, text, janitor."""

    def say(line: str) -> None:
        terminal.print_line({"name": name, "line": line}) if as_json else click.echo(line)

    def on_note(note: dict[str, object]) -> None:
        for line in cast("list[str]", note.get("lines", [])):
            say(line)

    def from_server() -> None:
        with here.client() as client:
            args = {"name": name, "lines": lines, "follow": follow}
            client.call("logs", args, on_note=on_note, timeout_s=None if follow else SHORT_S)

    if here.running or follow:
        return from_server()
    for line in _in_file(here.paths.logs, name, lines):
        say(line)
    return None


def _in_file(directory: Path, name: str, lines: int) -> list[str]:
    try:
        text = log_file(directory, name).read_text("utf-8", "replace")
    except OSError as e:
        raise CommandFailed(f"there is no log of {name} in {directory}, and omlxd is not running", Exit.NOT_FOUND) from e
    return text.splitlines()[-lines:] if lines else []
