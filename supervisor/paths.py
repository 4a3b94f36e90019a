"""Where everything lives: the directories of one OMLX_HOME, made private when they are made."""

import os
from dataclasses import dataclass
from pathlib import Path

from supervisor.ipc import endpoint
from supervisor.settings import Settings


class HomeUnusable(Exception):
    """A directory cannot be made or written; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class Paths:
    home: Path
    run: Path
    """Sockets, lock, pid. 0700."""
    logs: Path
    models: Path
    """The only model directory that omlxd writes to."""
    cache: Path
    state: Path
    """What is remembered between runs and can be thrown away."""

    @property
    def lock(self) -> Path:
        return self.run / "omlxd.lock"

    @property
    def control(self) -> Path:
        return self.run / "control.sock"

    @property
    def children(self) -> Path:
        """Which processes the server that runs, or ran last, has started."""
        return self.run / "children.json"

    @property
    def breadcrumb(self) -> Path:
        """Which models are busy."""
        return self.state / "busy.json"

    @property
    def data(self) -> Path:
        return self.run / "data.sock"


def paths_of(home: Path, settings: Settings) -> Paths:
    def given(value: str | None, default: str) -> Path:
        return Path(value).expanduser().absolute() if value else home / default

    return Paths(
        home=home,
        run=given(settings.server.run_dir, "run"),
        logs=given(settings.logging.log_dir, "logs"),
        models=home / "models",
        cache=given(settings.cache.ssd_cache_dir, "cache"),
        state=home / "state",
    )


def prepare(paths: Paths) -> None:
    """Makes the directories the server cannot do without.

    Raises:
        HomeUnusable: one of them cannot be made or written, or others may look into the run directory.
        PathTooLong: the run directory is too deep for its sockets.
    """
    endpoint(paths.control)
    if paths.run != paths.home / "run":
        _require_private(paths.run)
    for directory in (paths.home, paths.run, paths.logs, paths.models, paths.state):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError("not writable")
        except OSError as e:
            raise HomeUnusable(
                f"{directory} cannot be used ({e.strerror or e}); choose another place with OMLX_HOME or make it writable"
            ) from e
    paths.run.chmod(0o700)


def _require_private(run: Path) -> None:
    """A directory somebody has chosen may be /tmp: it is taken as it is or not at all."""
    try:
        found = run.stat()
    except OSError:
        return  # it is made, or that fails with a message of its own
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HomeUnusable(f"{run} is open to other users; give run_dir a directory of its own, or: chmod 700 {run}")
