"""`omlxctl service`: the server in the background, kept alive by launchd or systemd, and what a person is told about it."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import click

from supervisor import ctl_terminal as terminal
from supervisor import service as services
from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.paths import paths_of
from supervisor.protocol import ServerStatus
from supervisor.service import Account, DirectoryUnusable, Job, Keeper, KeeperFailed, KeeperMissing
from supervisor.service_state import DidNotCome, NotInstalled, Service, size_bytes
from supervisor.settings_load import home_of, load


def keeper_of(account: Account, system: bool) -> Keeper:
    if sys.platform == "darwin":
        from supervisor.service_launchd import Launchd

        return Launchd(account, system=system)
    from supervisor.service_systemd import Systemd

    return Systemd(account, system=system)


def for_system(command: Callable[..., object]) -> Callable[..., object]:
    return click.option("--system", is_flag=True, help="the machine's service, which needs no login (to change it: with sudo)")(
        command
    )


@click.group()
def service() -> None:
    """Run the server in the background, by launchd or systemd.

    The service runs this installation of omlxd. Its settings are those of settings.json in its home; variables and flags of a
    shell do not reach it.
    """


@service.command()
@for_system
@click.option("--user", help="with --system: whose service it is [default: who called sudo]")
@terminal.as_json_option
@pass_home
def install(here: Home, system: bool, user: str | None, as_json: bool) -> None:
    """Install the service and start it. Doing it again changes nothing, or what has changed since.

    Without --system it runs while you are logged in; with it, from the start of the machine on, as the user who called sudo.
    """
    account = _account(system, user)
    keeper = keeper_of(account, system)
    home = _home(here, account)
    plan = services.plan_for(paths_of(home, load({}, None, home).settings), account)
    log_bytes = size_bytes(plan.log)
    with _told():
        outcome = services.install(keeper, plan)
    if as_json:
        _warn_of_variables(home)
        return terminal.print_json({"outcome": outcome} | _came_up(Service(keeper), log_bytes))
    said = {"installed": "installed", "changed": "installed anew", "unchanged": "installed already"}[outcome]
    click.echo(f"{said}: {keeper.definition}")
    _warn_of_variables(home)
    _come_up(Service(keeper), log_bytes)
    click.echo(f"it runs {keeper.lasting}; log: {plan.log}")
    return None


@service.command()
@for_system
@terminal.as_json_option
def uninstall(system: bool, as_json: bool) -> None:
    """Stop the service and remove it. Models, cache and settings stay."""
    it = _service(system, changes=True)
    with _told():
        paths = it.paths if it.installed else None
        services.uninstall(it.keeper)
    if as_json:
        return terminal.print_json({"removed": str(it.keeper.definition) if paths else None})
    if paths is None:
        return click.echo("the service was not installed")
    click.echo(f"removed: {it.keeper.definition}")
    return click.echo(f"left alone: settings, models and logs in {paths.home}, the cache in {paths.cache}")


@service.command()
@for_system
@terminal.as_json_option
def start(system: bool, as_json: bool) -> None:
    """Start the installed service, and say where it serves."""
    it = _service(system, changes=True)
    with _told():
        it.keeper.require()
        log_bytes = size_bytes(it.log)
        it.keeper.start()
    if as_json:
        terminal.print_json(_came_up(it, log_bytes))
    else:
        _come_up(it, log_bytes)


@service.command()
@for_system
@terminal.as_json_option
def stop(system: bool, as_json: bool) -> None:
    """Stop the service until it is started again.

    Or until the next login; with --system, the next start of the machine.
    """
    it = _service(system, changes=True)
    with _told():
        it.keeper.require()
        it.keeper.stop()
        facts = _facts(it, it.keeper.job(), None) if as_json else {}
    again = f"omlxctl service start{' --system' if system else ''}"
    terminal.answer(facts, as_json, f"the service is stopped; to start it: {again}")


@service.command()
@for_system
@click.option("--json", "as_json", is_flag=True, help="everything, as JSON")
def status(system: bool, as_json: bool) -> int:
    """Say whether the service is installed, runs, and where. Ends with 3 when it does not run."""
    it = _service(system, changes=False)
    with _told():
        it.keeper.require()
        job = it.keeper.job()
        answer = it.answer() if it.installed else None
        if as_json:
            terminal.print_json(_facts(it, job, answer))
        else:
            _print_status(it, job, answer)
    return Exit.DONE if job.pid is not None else Exit.NOT_RUNNING


def _facts(it: Service, job: Job, answer: ServerStatus | None) -> dict[str, object]:
    return {
        "installed": it.installed,
        "definition": str(it.keeper.definition),
        "home": str(it.paths.home) if it.installed else None,
        "log": str(it.log) if it.installed else None,
        "loaded": job.known,
        "pid": job.pid,
        "last_exit": job.last_exit,
        "address": f"http://{answer.host}:{answer.port}" if answer else None,
    }


def _print_status(it: Service, job: Job, answer: ServerStatus | None) -> None:
    facts = {"service": str(it.keeper.definition) if it.installed else "not installed; to install it: omlxctl service install"}
    if job.pid is not None:
        facts["process"] = f"runs (pid {job.pid})"
    elif it.installed or job.known:
        facts["process"] = "does not run" + (f", last exit: {job.last_exit}" if job.last_exit else "")
    if answer:
        facts["server"] = f"omlxd {answer.version} on http://{answer.host}:{answer.port}, up {terminal.age(answer.started)}"
    elif job.pid is not None:
        facts["server"] = "does not answer on its control socket (its own user only may use that)"
    if it.installed:
        facts |= {"home": str(it.paths.home), "log": str(it.log)}
    terminal.print_facts(facts)
    if it.installed and job.pid is None:
        for line in it.said():
            click.echo(f"  {line}")


def _service(system: bool, *, changes: bool) -> Service:
    if changes:
        _require_root(system)
    return Service(keeper_of(services.account_of(), system))


def _require_root(system: bool) -> None:
    if system and os.geteuid() != 0:
        words = [str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]
        raise CommandFailed(f"the machine's services are root's to change: sudo {shlex.join(words)}")


def _account(system: bool, user: str | None) -> Account:
    """Who the server will run as: never root by accident, since it reads what strangers have made."""
    _require_root(system)
    if not system:
        if user:
            raise CommandFailed("--user goes with --system; without it the service is your own", Exit.USAGE)
        return services.account_of()
    name = user or os.environ.get("SUDO_USER")
    if not name:
        raise CommandFailed("whose service is it to be? say so with --user NAME, or call this with sudo", Exit.USAGE)
    try:
        return services.account_of(name)
    except KeyError as e:
        raise CommandFailed(f"there is no user {name}", Exit.NOT_FOUND) from e


def _home(here: Home, account: Account) -> Path:
    if here.given or "OMLX_HOME" in os.environ or account.uid == os.getuid():
        return home_of(os.environ, here.given)
    return account.home / ".omlxd"


def _warn_of_variables(home: Path) -> None:
    names = ", ".join(sorted(name for name in os.environ if name.startswith("OMLX_") and name != "OMLX_HOME"))
    if names:
        terminal.warn(f"the service does not see {names} of this shell; what it needs belongs into {home}/settings.json")


def _came_up(it: Service, log_bytes: int) -> dict[str, object]:
    with _told():
        it.wait_until_it_serves(log_bytes)
        return _facts(it, it.keeper.job(), it.answer())


def _come_up(it: Service, log_bytes: int) -> None:
    with _told():
        it.wait_until_it_serves(log_bytes)
    if answer := it.answer():
        click.echo(f"omlxd (pid {answer.pid}) serves on http://{answer.host}:{answer.port}")
    else:
        click.echo(f"omlxd (pid {it.keeper.job().pid}) runs")


@contextlib.contextmanager
def _told() -> Generator[None]:
    """What launchd, systemd or the disk refuses ends the command with their own words."""
    try:
        yield
    except NotInstalled as e:
        raise CommandFailed(str(e), Exit.NOT_FOUND) from e
    except (KeeperMissing, KeeperFailed, DirectoryUnusable, DidNotCome) as e:
        raise CommandFailed(str(e)) from e
    except PermissionError as e:
        raise CommandFailed(f"{e.filename}: {e.strerror}") from e
