"""omlxctl's commands about models: what there is, what is loaded, adding, importing and removing.

Those that only touch files also work while no server runs; with one, the server does it, so that its catalog stays true.
"""

import sys
from pathlib import Path
from typing import cast

import click
import msgspec

from supervisor import ctl_catalog
from supervisor import ctl_terminal as terminal
from supervisor.client import ControlClient
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.ctl_model_facts import facts_of
from supervisor.protocol import SlotStatus

JSON = terminal.as_json_option

BEFORE_STAGES = {
    "queued": "waiting for memory",
    "spawning": "starting",
    "loading": "starting",
    "backoff": "waiting after a crash",
}
"""What a load is at before the worker tells."""


@click.command()
@click.argument("model")
@click.option("--pin", is_flag=True, help="never evict it for another model")
@click.option("--wait/--no-wait", default=True, help="return when it is loaded [default], or at once")
@JSON
@pass_home
def load(here: Home, model: str, pin: bool, wait: bool, as_json: bool) -> None:
    """Load MODEL now instead of at its first request. Ctrl-C ends the waiting, not the loading."""
    if not wait:
        with here.client() as client:
            started = client.call("load", {"model": model, "pin": pin, "wait": False})
        return terminal.answer(started, as_json, f"{started.get('model', model)} is {started.get('state')}")
    progress = terminal.Progress(f"loading {model}")

    def on_note(note: dict[str, object]) -> None:
        stage = note.get("stage") or BEFORE_STAGES.get(str(note.get("state")), note.get("state"))
        progress.show(str(stage), cast("int", note.get("done") or 0), cast("int", note.get("total") or 0))

    with here.client() as client:
        try:
            result = client.call("load", {"model": model, "pin": pin}, on_note, timeout_s=None)
        finally:
            progress.end()
    if as_json:
        return terminal.print_json(result)
    load_s = cast("float", result.get("load_s", 0.0))
    click.echo(f"{result.get('model', model)} is loaded (pid {result.get('pid')}, {load_s:.1f} s)")
    return None


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="do not wait for its running requests")
@JSON
@pass_home
def unload(here: Home, model: str, force: bool, as_json: bool) -> None:
    """Unload MODEL and give its memory back. Running requests finish first, for 30 s at most."""
    with here.client() as client:
        result = client.call("unload", {"model": model, "force": force}, timeout_s=None)
    terminal.answer(result, as_json, f"{model} is unloaded")


@click.command()
@click.argument("model")
@JSON
@pass_home
def pin(here: Home, model: str, as_json: bool) -> None:
    """Keep MODEL loaded until it is unpinned or the server ends.

    For good: omlxctl config set models.ID.pinned true. A pinned model is not unloaded to make room or for idleness, and is
    loaded again after a crash. Pinning loads nothing. `omlxctl unload` ends it too.
    """
    with here.client() as client:
        result = client.call("pin", {"model": model})
    terminal.answer(result, as_json, f"{model} is pinned")


@click.command()
@click.argument("model")
@JSON
@pass_home
def unpin(here: Home, model: str, as_json: bool) -> None:
    """Let MODEL go again when others need its memory.

    That holds until the server ends, whatever the settings say.
    """
    with here.client() as client:
        result = client.call("unpin", {"model": model})
    terminal.answer(result, as_json, f"{model} is not pinned")


@click.command()
@click.argument("model")
@JSON
@pass_home
def reset(here: Home, model: str, as_json: bool) -> None:
    """Forget the crashes of MODEL, so that it is tried again at once.

    Also what it died with, and how large it once was: a loaded model is charged what it takes now.
    """
    with here.client() as client:
        result = client.call("reset", {"model": model})
    terminal.answer(result, as_json, f"{model} will be tried again")


@click.group(invoke_without_command=True)
@JSON
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models, or show, add, import and remove them."""
    if context.invoked_subcommand is None:
        _list(context.ensure_object(Home), as_json)


def _list(here: Home, as_json: bool) -> None:
    result = here.either(lambda client: client.call("models"), lambda: ctl_catalog.listed(here))
    if as_json:
        return terminal.print_json(result)
    found = msgspec.convert(result.get("models", []), list[SlotStatus])
    if found:
        profiles = "PROFILES (* gives the defaults)" if any(m.profiles for m in found) else ""
        terminal.print_table(["MODEL", "STATE", "CONTEXT", "SIZE", "PATH", profiles], [_row(m) for m in found])
    else:
        from supervisor.catalog import GET_ONE_IN

        dirs = ", ".join(cast("list[str]", result.get("dirs", [])))
        click.echo(f"no models in {dirs}; get one in with: {GET_ONE_IN}")
    for model in found:
        if model.problem:
            terminal.warn(f"{model.id}: {model.problem}")
    for skipped in cast("list[dict[str, str]]", result.get("skipped", [])):
        terminal.warn(f"passed over {skipped['path']}: {skipped['reason']}")
    return None


def _row(m: SlotStatus) -> list[str]:
    profiles = ", ".join(f":{name}{'*' * (name == m.profile)}" for name in m.profiles)
    state = m.state if m.usable else "unusable"
    return [m.id, state, str(m.context), terminal.size(m.weights_bytes), m.adapter or m.path, profiles]


@models.command()
@click.argument("model")
@JSON
@pass_home
def show(here: Home, model: str, as_json: bool) -> None:
    """Show one MODEL: files, state, defaults and where they come from."""
    result = here.either(lambda client: client.call("model", {"model": model}), lambda: ctl_catalog.shown(here, model))
    if as_json:
        return terminal.print_json(result)
    slot = msgspec.convert({k: v for k, v in result.items() if k in SlotStatus.__struct_fields__}, SlotStatus)
    terminal.print_facts(facts_of(slot, cast("dict[str, object]", result.get("capabilities") or {})))
    defaults = cast("dict[str, dict[str, object]]", result.get("defaults", {}))
    if defaults:
        click.echo()
        rows = [[name, str(d["value"]), str(d["source"])] for name, d in defaults.items() if d["value"] is not None]
        terminal.print_table(["DEFAULT", "VALUE", "FROM"], rows)
    return None


@models.command("add")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--name", help="what to call it [default: the directory's name]")
@JSON
@pass_home
def add(here: Home, directory: Path, name: str | None, as_json: bool) -> None:
    """Register the MLX model in DIRECTORY by a link.

    Its files stay where they are. A directory that holds many models is given to `serve` instead: --model-dir DIR.
    """
    from supervisor.catalog_edit import EditRefused, add_link

    try:
        link = add_link(here.paths.models, directory.absolute(), name or directory.absolute().name)
    except EditRefused as e:
        raise CommandFailed(str(e), Exit.REFUSED) from e
    model = str(link.relative_to(here.paths.models))
    here.either(lambda client: client.call("rescan"), dict)
    if as_json:
        return terminal.print_json({"model": model, "path": str(link)})
    click.echo(f"{model} is registered")
    return None


@models.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--name", help="what to call it [default: the file's name without .gguf]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16", "keep"]),
    default="auto",
    show_default=True,
    help="auto: keep 4 and 8 bit weights on a GPU, float32 on the CPU build",
)
@JSON
@pass_home
def import_(here: Home, file: Path, name: str | None, dtype: str, as_json: bool) -> None:
    """Turn a GGUF FILE into an MLX model. All or nothing: nothing is left of an import that fails."""
    from supervisor import ctl_import

    name = name or file.name.removesuffix(".gguf")
    args = {"file": str(file.absolute()), "name": name, "dtype": dtype}
    progress = terminal.Progress(f"importing {name}")

    def on_note(note: dict[str, object]) -> None:
        progress.show(str(note.get("stage", "")), cast("int", note.get("done", 0)), cast("int", note.get("total", 0)))

    def by_server(client: ControlClient) -> dict[str, object]:
        return client.call("import", args, on_note, timeout_s=None)

    try:
        result = here.either(by_server, lambda: ctl_import.run(here.paths, file.absolute(), name, dtype, on_note))
    finally:
        progress.end()
    if as_json:
        return terminal.print_json(result)
    click.echo(f"{name} is imported: {terminal.size(cast('int', result['bytes']))} as {result['dtype']} in {result['path']}")
    return None


@models.command("rm")
@click.argument("model")
@click.option("--yes", is_flag=True, help="do not ask")
@JSON
@pass_home
def remove(here: Home, model: str, yes: bool, as_json: bool) -> None:
    """Remove MODEL. Of a model that was added by a link only the link goes; an imported one is deleted."""
    if not yes:
        _confirm(here, model)
    here.either(
        lambda client: client.call("remove", {"model": model}, timeout_s=None),
        lambda: _remove_on_disk(here, model),
    )
    terminal.answer({"model": model, "removed": True}, as_json, f"{model} is removed")


def _confirm(here: Home, model: str) -> None:
    slot = here.either(lambda client: client.call("model", {"model": model}), lambda: ctl_catalog.shown(here, model))
    path = Path(str(slot.get("adapter") or slot["path"]))
    what = "the link" if path.is_symlink() else terminal.size(cast("int", slot["weights_bytes"]))
    if not sys.stdin.isatty():
        raise CommandFailed(f"removing {model} ({what} at {path}) needs a yes: omlxctl models rm {model} --yes", Exit.USAGE)
    click.confirm(f"Remove {model}: {what} at {path}?", abort=True)


def _remove_on_disk(here: Home, model: str) -> dict[str, object]:
    from supervisor.catalog_edit import EditRefused, remove

    try:
        remove(here.paths.models, ctl_catalog.found(here, model).own_path)
    except EditRefused as e:
        raise CommandFailed(str(e), Exit.REFUSED) from e
    return {}
