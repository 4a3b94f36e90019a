"""`omlxctl doctor`: what the checks found, for a person or as JSON, and in an archive to pass on."""

from dataclasses import asdict
from pathlib import Path

import click

from supervisor import ctl_terminal as terminal
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="the findings as JSON")
@click.option("--bundle", type=click.Path(path_type=Path, dir_okay=False), help="also write an archive (.tar.gz) to pass on")
@pass_home
def doctor(here: Home, as_json: bool, bundle: Path | None) -> int:
    """Check this machine and this installation. Ends with 1 when something would keep the server from working.

    The archive holds the findings, the settings, the server's state, its events, and of its logs only the lines it wrote
    itself. There are no prompts, no answers and no keys in it.
    """
    from supervisor.doctor import examine

    findings = list(examine(here))
    if as_json:
        terminal.print_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            click.secho(finding.level.ljust(8), fg=COLOURS[finding.level], nl=False)
            click.echo(f"{finding.name.ljust(width)}  {finding.text}")
    if bundle is not None:
        from supervisor.doctor_bundle import write_bundle

        try:
            names = write_bundle(here, findings, bundle)
        except OSError as e:
            raise CommandFailed(f"{bundle} cannot be written: {e.strerror}", answered=as_json) from e
        click.echo(f"{bundle} is written: {', '.join(names)}", err=True)
    return Exit.FAILED if any(finding.level == "error" for finding in findings) else Exit.DONE
