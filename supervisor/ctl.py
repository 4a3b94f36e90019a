"""The commands `omlxctl` and `omlxd`: puts the subcommands together and turns every outcome into an exit status.

A command's docstring is its manual. No ctl module may import anything slow at its top: `omlxctl status` is run in loops.
"""

import sys
from pathlib import Path

import click

from supervisor import (
    ctl_cache,
    ctl_chat,
    ctl_config,
    ctl_doctor,
    ctl_events,
    ctl_exit,
    ctl_logs,
    ctl_models,
    ctl_operate,
    ctl_profiles,
    ctl_server,
    ctl_service,
    ctl_trace,
)
from supervisor.ctl_group import Sections
from supervisor.ctl_home import Home


@click.group(cls=Sections, epilog=ctl_exit.MANUAL, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", type=click.Path(path_type=Path), help="directory of the server [default: $OMLX_HOME or ~/.omlxd]")
@click.version_option(package_name="omlxd", prog_name="omlxd", message="%(prog)s %(version)s", help="show the version and exit")
@click.pass_context
def omlxctl(context: click.Context, home: Path | None) -> None:
    """Run and steer omlxd, a local server for language models.

    \b
    omlxctl serve               run the server
    omlxctl run M "question"    ask a model one thing
    omlxctl status              what the server is doing
    """
    context.obj = Home(home)


omlxctl.add_section("Talk to a model", (ctl_chat.run, ctl_chat.chat))
omlxctl.add_section(
    "The server",
    (ctl_server.serve, ctl_service.service, ctl_server.stop, ctl_operate.restart, ctl_config.config, ctl_server.reload),
)
omlxctl.add_section(
    "Models",
    (
        *(ctl_models.models, ctl_models.load, ctl_models.unload, ctl_models.pin, ctl_models.unpin),
        *(ctl_profiles.apply, ctl_models.reset, ctl_cache.cache),
    ),
)
omlxctl.add_section(
    "What is going on",
    (
        *(ctl_server.status, ctl_server.ps, ctl_logs.logs, ctl_events.events),
        *(ctl_trace.trace, ctl_doctor.doctor, ctl_operate.dump),
    ),
)


def main() -> None:
    sys.exit(_run(omlxctl))


def serve_main() -> None:
    """`omlxd` is `omlxctl serve`."""
    sys.exit(_run(ctl_server.serve))


def _run(command: click.Command) -> int:
    try:
        return int(command.main(standalone_mode=False) or 0)
    except (Exception, KeyboardInterrupt) as problem:  # the process boundary; `report` raises what is a bug
        return ctl_exit.report(problem, as_json="--json" in sys.argv[1:])
