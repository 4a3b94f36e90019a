"""The checks of `omlxctl doctor`: each looks at one thing that makes a server fail or run slowly. Changes nothing."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from supervisor import ctl_terminal as terminal
from supervisor.client import CallFailed, NoAnswer, NotRunning
from supervisor.ctl_home import Home
from supervisor.ipc import PathTooLong, endpoint
from supervisor.settings_load import SettingsInvalid

if TYPE_CHECKING:
    from supervisor.settings import Settings
    from supervisor.settings_values import Size

LIBRARIES = ("mlx", "mlx-lm", "tokenizers", "aiohttp", "pyzmq", "msgspec", "gguf")
LOW_DISK_BYTES = 10 * 2**30
LOW_FILES = 1024
"""A stream is one descriptor in the gateway; a model of many shards is some in its worker."""
CLOCK_OFF_S = 60.0
BEGAN = 1_760_000_000
"""October 2025: a clock before this code was written is wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Literal["ok", "warning", "error"]
    text: str


def examine(here: Home) -> Iterator[Finding]:
    yield from _installation()
    yield from _hardware()
    yield from _limits()
    yield from _settings(here)
    yield from _directories(here)
    yield from _models(here)
    yield from _clock(here)
    yield from _server(here)


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
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("machine", "ok", f"{system}, {os.cpu_count()} cores, {ram} of memory")
    if sys.platform == "darwin" and not has_metal():
        yield Finding("accelerator", "error", "MLX needs Apple silicon and a Python built for it (arm64)")
    elif warning := slow_path_warning():
        yield Finding("accelerator", "warning", warning)
    elif has_metal():
        yield Finding("accelerator", "ok", "Metal")
    else:
        yield Finding("accelerator", "ok", "CUDA" if importlib.util.find_spec("mlx_cuda") else "CPU with OpenBLAS")


def _limits() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LOW_FILES:
        yield Finding("files", "warning", f"a process may open only {soft} files; raise it with: ulimit -n {2 * LOW_FILES}")
    else:
        yield Finding("files", "ok", f"a process may open {soft} files (at most {hard})")


def _settings(here: Home) -> Iterator[Finding]:
    try:
        loaded = here.loaded
    except SettingsInvalid as e:
        for problem in e.problems:
            yield Finding("settings", "error", problem)
        return
    file = loaded.home / "settings.json"
    yield Finding("settings", "ok", f"valid ({file})")
    for warning in loaded.warnings:
        yield Finding("settings", "warning", warning)
    if file.exists() and file.stat().st_mode & 0o077 and loaded.settings.auth.api_key:
        yield Finding("settings", "warning", f"{file} holds a key and others may read it; chmod 600 {file}")
    yield from budget_findings(loaded.settings)


def budget_findings(settings: "Settings") -> Iterator[Finding]:
    """What models get, and whether limits of the user's promise more than the system will hold."""
    from supervisor import budget, hardware, policy

    total = hardware.total_ram_bytes()
    given = policy.budget_sum(settings).total_bytes
    yield Finding(
        "budget", "ok", f"{terminal.size(given)} of {terminal.size(total)} for models ({settings.memory.memory_tier})"
    )
    if hardware.has_metal():
        cap = budget.metal_cap_bytes(total, hardware.wired_limit_bytes())
        wish = total - budget.reserve_bytes(total, budget.Tier(settings.memory.memory_tier))
        if cap < wish:
            megabytes = wish // 2**20
            yield Finding(
                "budget",
                "warning",
                f"the GPU may hold only {terminal.size(cap)}; to let models have {terminal.size(wish)}: "
                f"sudo sysctl iogpu.wired_limit_mb={megabytes}",
            )
    for name in ("max_model_memory", "max_model_weights", "max_process_memory"):
        limit = cast("Size | None", getattr(settings.memory, name))
        wanted = limit.of(total) if limit is not None else 0
        if wanted > given:
            text = f"is {terminal.size(wanted)}, but no more than {terminal.size(given)} can be given"
            yield Finding("budget", "warning", f"memory.{name} {text}")


def _directories(here: Home) -> Iterator[Finding]:
    paths = here.paths
    for name, path in (("home", paths.home), ("logs", paths.logs), ("cache", paths.cache), ("run", paths.run)):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Finding(name, "error", f"{path} cannot be written")
        elif path.exists() and path.stat().st_uid != os.getuid():
            yield Finding(name, "warning", f"{path} belongs to another user (uid {path.stat().st_uid})")
        elif (free_bytes := shutil.disk_usage(there).free) < LOW_DISK_BYTES:
            yield Finding(name, "warning", f"{path} has only {terminal.size(free_bytes)} free")
        else:
            yield Finding(name, "ok", f"{path}, {terminal.size(free_bytes)} free")
    if paths.run.exists() and paths.run.stat().st_mode & 0o077:
        yield Finding("run", "error", f"{paths.run} is open to other users; chmod 700 {paths.run}")
    try:
        endpoint(paths.control)
    except PathTooLong as e:
        yield Finding("run", "error", str(e))


def _models(here: Home) -> Iterator[Finding]:
    from supervisor.catalog import GET_ONE_IN
    from supervisor.ctl_catalog import catalog_of, roster_of

    try:
        catalog, roster = catalog_of(here), roster_of(here, here.loaded)
    except SettingsInvalid:
        return  # said already
    bad = [(entry.id, entry.files.problem) for entry in catalog.models if entry.files.problem]
    bad += [(skipped.shown, skipped.reason) for skipped in catalog.skipped]
    yield Finding(
        "models", "ok", f"{len(catalog.models)} found" if catalog.models else f"none yet; get one in with: {GET_ONE_IN}"
    )
    for name, reason in bad:
        yield Finding("models", "warning", f"{name}: {reason}")
    for problem in roster.clashes():
        yield Finding("settings", "error", problem)
    for problem in roster.unknown():
        yield Finding("settings", "warning", problem)


def _clock(here: Home) -> Iterator[Finding]:
    now = time.time()
    newest = max((p.stat().st_mtime for p in here.paths.logs.glob("*.log")), default=0.0) if here.paths.logs.is_dir() else 0.0
    if now < BEGAN:
        yield Finding("clock", "error", f"it is set to {time.strftime('%Y-%m-%d', time.gmtime(now))}, which is past; set it")
    elif newest > now + CLOCK_OFF_S:
        yield Finding("clock", "warning", f"it has gone back: a log was written {newest - now:.0f} s from now")
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _server(here: Home) -> Iterator[Finding]:
    run = here.paths.run
    try:
        with here.client() as client:
            status = client.call("status")
    except NotRunning:
        yield Finding("server", "ok", "not running")
        yield from _left_behind(run)
        return
    except NoAnswer as e:
        yield Finding("server", "error", f"{e}; if it stays so, end it and start it again: kill -9 {e.pid}")
        return
    except CallFailed as e:
        yield Finding("server", "error", e.message)
        return
    import importlib.metadata

    mine = importlib.metadata.version("omlxd")
    yield Finding("server", "ok", f"running in {run} (pid {status['pid']})")
    if status["version"] != mine:
        text = f"it runs version {status['version']}, installed is {mine}; start it again: omlxctl restart"
        yield Finding("server", "warning", text)
    for warning in cast("list[str]", status.get("warnings", [])):
        yield Finding("server", "warning", warning)
    for model in cast("list[dict[str, object]]", status.get("models", [])):
        if model.get("slow"):
            yield Finding("server", "warning", f"{model['id']} is slow: {model['slow']}")
        if model.get("state") in ("failed", "backoff"):
            last = str(model.get("last_error") or "").strip().splitlines()[-1:]
            yield Finding("server", "warning", f"{model['id']} is in {model['state']}: {''.join(last)}")


def _left_behind(run: Path) -> Iterator[Finding]:
    """Processes of a server that is gone, which hold memory and perhaps the port."""
    from supervisor.census import of_former_server

    for process in of_former_server(run / "children.json"):
        text = f"process {process.pid} has outlived a server that is gone; the next start ends it"
        yield Finding("server", "warning", text)
