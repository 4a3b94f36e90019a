"""`omlxctl config`: the effective settings with where each came from, changing one, and taking over those of oMLX."""

from dataclasses import asdict
from pathlib import Path
from typing import cast

import click

from supervisor import ctl_terminal as terminal
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.settings import leaves
from supervisor.settings_load import FILE, SettingsInvalid, read_file, write_value
from supervisor.settings_show import HIDDEN, effective

OMLX_HOME = Path("~/.omlx")


@click.group()
def config() -> None:
    """Show or change the settings, or take over those of oMLX."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="values and sources as JSON")
@pass_home
def show(here: Home, as_json: bool) -> None:
    """Print every setting with its value and where that came from. Keys are masked."""
    result = here.either(lambda client: client.call("config"), lambda: effective(here.loaded))
    if as_json:
        return terminal.print_json(result)
    values, sources = (cast("dict[str, object]", result[key]) for key in ("values", "sources"))
    unset = {leaf.path: "none" for leaf in leaves() if leaf.setting.secret}
    rows = [
        [path, unset.get(path, "auto") if value is None else _shown(value), str(sources.get(path, ""))]
        for path, value in values.items()
    ]
    terminal.print_table(["SETTING", "VALUE", "FROM"], rows)
    click.echo(f"\nfile: {result['home']}/{FILE}")
    for warning in cast("list[str]", result.get("warnings", [])):
        terminal.warn(warning)
    return None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(str(v) for v in cast("list[object]", value)) or "-"
    return str(value)


@config.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="value and source as JSON")
@pass_home
def get(here: Home, key: str, as_json: bool) -> None:
    """Print the value of one setting: section.name, or models.ID.name. Keys are masked."""
    from supervisor.settings_edit import split

    split(key)
    result = here.either(lambda client: client.call("config"), lambda: effective(here.loaded))
    values, sources = (cast("dict[str, object]", result[part]) for part in ("values", "sources"))
    value = values.get(key)
    if as_json:
        return terminal.print_json({"key": key, "value": value, "source": sources.get(key)})
    click.echo("" if value is None else _shown(value))
    return None


@config.command(name="set")
@click.argument("key")
@click.argument("value")
@terminal.as_json_option
@pass_home
def set_(here: Home, key: str, value: str, as_json: bool) -> None:
    """Write one setting to settings.json and tell a running server. VALUE may be JSON; auto or null takes the setting away.

    Nothing is written unless the whole file is valid with it. A flag or a variable that sets the same goes on winning.
    """
    from supervisor.ctl_catalog import roster_of
    from supervisor.settings_edit import set_value, value_from
    from supervisor.settings_lock import NotWritten

    try:
        wanted = value_from(value)
        set_value(here.paths.home, key, None if wanted == "auto" else wanted, lambda loaded: roster_of(here, loaded).clashes())
    except (NotWritten, OSError) as e:
        raise CommandFailed(f"{key} is not set: {e}") from e
    outcome = here.either(lambda client: client.call("reload"), dict)
    restart = cast("list[str]", outcome.get("restart", []))
    when = "takes effect after: omlxctl restart" if key in restart else "is set"
    terminal.answer({"key": key, "applies": "restart" if key in restart else "now"}, as_json, f"{key} {when}")
    _warn_of_other_source(here, key)


def _warn_of_other_source(here: Home, key: str) -> None:
    result = here.either(lambda client: client.call("config"), lambda: effective(here.load()))
    source = cast("dict[str, str]", result["sources"]).get(key, FILE)
    if source.startswith(("flag", "environment")):
        terminal.warn(f"{key} still comes from {source}, which goes before {FILE}")


@config.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@terminal.as_json_option
@pass_home
def import_(here: Home, file: Path, as_json: bool) -> None:
    """Take over oMLX's settings, and say of each what became of it.

    FILE is ~/.omlx/settings.json; it is only read.
    """
    from supervisor.settings_import import ImportInvalid, merged, read_omlx
    from supervisor.settings_lock import NotWritten, changing

    problems: list[str] = []
    home = here.paths.home
    read_file(home / FILE, problems)
    if problems:
        raise SettingsInvalid(problems)
    try:
        found = read_omlx(file, OMLX_HOME)
    except ImportInvalid as e:
        raise CommandFailed("\n  ".join(["nothing was taken over:", *e.problems]), Exit.USAGE) from e
    if home.resolve() == OMLX_HOME.expanduser().resolve():
        raise CommandFailed(f"{OMLX_HOME} belongs to oMLX; omlxd needs another home (OMLX_HOME)", Exit.USAGE)
    secret = {leaf.path for leaf in leaves() if leaf.setting.secret}
    taken = [{**asdict(i), "value": HIDDEN if i.target in secret else _shown(i.value)} for i in found.taken]
    if taken:
        try:
            with changing(home):
                write_value(home, merged(read_file(home / FILE, problems), found.taken))
        except (NotWritten, OSError) as e:
            raise CommandFailed(f"nothing was taken over: {e}") from e
    if as_json:
        return terminal.print_json({"file": str(home / FILE), "taken": taken, "left": [asdict(left) for left in found.left]})
    for item in taken:
        note = f" ({item['note']})" if item["note"] else ""
        click.echo(f"taken    {item['source']} -> {item['target']} = {item['value']}{note}")
    for left in found.left:
        click.echo(f"not      {left.source}: {left.reason}")
    what = f"{len(found.taken)} settings are now in {home / FILE}"
    click.echo(what + ("; tell the server with: omlxctl reload" if here.running else ""))
    return None
