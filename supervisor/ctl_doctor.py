"""`omlxctl doctor`: looks for what makes a server fail or run slowly on this machine. Changes nothing, loads no MLX."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from supervisor import ctl_terminal as terminal
from supervisor.ctl_exit import Exit
from supervisor.ctl_home import Home, pass_home
from supervisor.ipc import PathTooLong, endpoint
from supervisor.settings_load import SettingsInvalid

LIBRARIES = ("mlx", "mlx-lm", "tokenizers", "aiohttp", "pyzmq", "msgspec", "gguf")
LOW_DISK_BYTES = 10 * 2**30
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Literal["ok", "warning", "error"]
    text: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="the findings as JSON")
@pass_home
def doctor(here: Home, as_json: bool) -> int:
    """Check this machine and this installation. Ends with 1 when something would keep the server from working."""
    findings = list(examine(here))
    if as_json:
        terminal.print_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            click.secho(finding.level.ljust(8), fg=COLOURS[finding.level], nl=False)
            click.echo(f"{finding.name.ljust(width)}  {finding.text}")
    return Exit.FAILED if any(finding.level == "error" for finding in findings) else Exit.DONE


def examine(here: Home) -> Iterator[Finding]:
    yield from _installation()
    yield from _hardware()
    yield from _settings(here)
    yield from _directories(here)
    yield Finding("server", "ok", f"running in {here.paths.run}" if here.running else "not running")


def _installation() -> Iterator[Finding]:
    import importlib.metadata  # late, as all that only this command needs

    yield Finding(
        "omlxd", "ok", f"{importlib.metadata.version('omlxd')}, Python {platform.python_version()} ({sys.executable})"
    )
    for name in LIBRARIES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "error", "is not installed; install omlxd again, with its dependencies")
    ours = Path(__file__).resolve().parent
    for other in foreign_packages(ours):
        yield Finding(
            "packages",
            "error",
            f"{other} is another project's package named {ours.name}; install omlxd in an environment of its own",
        )


def foreign_packages(ours: Path) -> list[Path]:
    """Other `supervisor` packages that a process of ours might import instead of this one."""
    found = [Path(entry or ".") / ours.name for entry in sys.path]
    return [path for path in dict.fromkeys(found) if (path / "__init__.py").is_file() and path.resolve() != ours]


def _hardware() -> Iterator[Finding]:
    import importlib.util

    from supervisor.hardware import has_metal, slow_path_warning, total_ram_bytes

    ram = terminal.size(total_ram_bytes())
    yield Finding("machine", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {ram} of memory")
    if sys.platform == "darwin" and not has_metal():
        yield Finding("accelerator", "error", "MLX needs Apple silicon and a Python built for it (arm64)")
    elif warning := slow_path_warning():
        yield Finding("accelerator", "warning", warning)
    elif has_metal():
        yield Finding("accelerator", "ok", "Metal")
    else:
        yield Finding("accelerator", "ok", "CUDA" if importlib.util.find_spec("mlx_cuda") else "CPU with OpenBLAS")


def _settings(here: Home) -> Iterator[Finding]:
    try:
        loaded = here.loaded
    except SettingsInvalid as e:
        for problem in e.problems:
            yield Finding("settings", "error", problem)
        return
    yield Finding("settings", "ok", f"valid ({loaded.home / 'settings.json'})")
    for warning in loaded.warnings:
        yield Finding("settings", "warning", warning)


def _directories(here: Home) -> Iterator[Finding]:
    paths = here.paths
    for name, path in (("home", paths.home), ("logs", paths.logs), ("cache", paths.cache), ("run", paths.run)):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Finding(name, "error", f"{path} cannot be written")
        elif (free_bytes := shutil.disk_usage(there).free) < LOW_DISK_BYTES:
            yield Finding(name, "warning", f"{path} has only {terminal.size(free_bytes)} free")
        else:
            yield Finding(name, "ok", f"{path}, {terminal.size(free_bytes)} free")
    try:
        endpoint(paths.control)
    except PathTooLong as e:
        yield Finding("run", "error", str(e))
