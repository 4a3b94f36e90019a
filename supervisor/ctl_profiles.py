"""`omlxctl apply`: a profile becomes the defaults of its model."""

import click

from supervisor import ctl_catalog
from supervisor import ctl_terminal as terminal
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home


@click.command()
@click.argument("model")
@click.argument("profile", required=False)
@click.option("--none", "no_profile", is_flag=True, help="the model's own defaults again")
@click.option("--json", "as_json", is_flag=True, help="the answer as JSON")
@pass_home
def apply(here: Home, model: str, profile: str | None, no_profile: bool, as_json: bool) -> None:
    """Make PROFILE the defaults of MODEL.

    omlxctl apply MODEL PROFILE, or: omlxctl apply MODEL:PROFILE. It is written to settings.json (models.ID.profile) and holds
    from the next request on; a loaded model stays loaded.
    """
    if no_profile and profile is not None:
        raise CommandFailed("either a profile or --none", Exit.USAGE)
    args = {"model": model} | ({"profile": ""} if no_profile else {"profile": profile} if profile else {})
    result = here.either(lambda client: client.call("apply", args), lambda: _in_file(here, model, profile, no_profile))
    if as_json:
        return terminal.print_json(result)
    if result["profile"]:
        click.echo(f"{result['model']} has the defaults of {result['model']}:{result['profile']}")
    else:
        click.echo(f"{result['model']} has its own defaults")
    return None


def _in_file(here: Home, model: str, profile: str | None, no_profile: bool) -> dict[str, object]:
    """While no server runs; the settings say which profiles there are."""
    from supervisor.settings_edit import set_value
    from supervisor.settings_lock import NotWritten
    from supervisor.settings_names import parted

    if profile is None and not no_profile:
        model, profile = parted(model) or (model, None)
        if profile is None:
            raise CommandFailed(f"which profile is to be applied to {model}? see: omlxctl models show {model}", Exit.USAGE)
    entry = ctl_catalog.found(here, model)
    try:
        set_value(here.paths.home, f"models.{entry.id}.profile", profile)
    except (NotWritten, OSError) as e:
        raise CommandFailed(str(e)) from e
    return {"model": entry.id, "profile": profile}
