"""`omlxctl events`: what happened to models and processes, as the server tells everybody who watches."""

import time
from collections.abc import Iterator

import click

from supervisor import ctl_terminal as terminal
from supervisor.client import ControlClient
from supervisor.ctl_home import Home, pass_home
from supervisor.protocol import Event, EventKind, Snapshot, plain

RING = 1000
"""How many the server remembers."""


@click.command()
@click.option("-f", "--follow", is_flag=True, help="go on printing until Ctrl-C")
@click.option("-n", "--last", default=50, show_default=True, type=click.IntRange(0, RING), help="how many of the last events")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([str(k) for k in EventKind]), help="only these (repeatable)")
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line")
@pass_home
def events(here: Home, follow: bool, last: int, kinds: tuple[str, ...], as_json: bool) -> None:
    """Print what happened to models, processes and settings."""
    with here.client() as client:
        for event in told(client, last, follow):
            if not kinds or event.kind in kinds:
                terminal.print_line(plain(event)) if as_json else click.echo(_line(event))


def told(client: ControlClient, last: int, follow: bool = False) -> Iterator[Event]:
    """The last ones, then what comes, each once and in order."""
    until = since = 0
    caught_up = False
    for message in client.watch():
        if isinstance(message, Snapshot):
            until, since = message.seq, max(0, message.seq - last)
            caught_up = since == until
            if not caught_up:
                client.watch_from(since)
            elif not follow:
                return
        elif caught_up or message.seq <= until:  # what comes before the old ones comes again after them
            caught_up = caught_up or message.seq == until
            yield message
            if caught_up and not follow:
                return


def _line(event: Event) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.ts))
    data = dict(event.data)
    if event.status is not None:
        data.setdefault("state", event.status.state)
    said = " ".join(f"{key}={value}" for key, value in data.items() if value not in ("", None, [], {}) and key != "name")
    name = event.model or data.get("name") or ""
    return " ".join(part for part in (stamp, event.kind.ljust(8), str(name), said) if part)
