"""Which server omlxctl talks to: the home it was given, its settings and directories, and a connection to its supervisor."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import click

from supervisor.client import ControlClient, NotRunning
from supervisor.instance import running_pid
from supervisor.paths import Paths, paths_of
from supervisor.settings import ServerSettings, Settings
from supervisor.settings_load import FILE, Loaded, SettingsInvalid, home_of, load, read_file

T = TypeVar("T")


@dataclass
class Home:
    """One OMLX_HOME as this command sees it."""

    given: Path | None = None

    def load(self, flags: Mapping[str, object] | None = None) -> Loaded:
        """The effective settings; raises `SettingsInvalid`."""
        return load(os.environ, flags, self.given)

    @cached_property
    def loaded(self) -> Loaded:
        return self.load()

    @cached_property
    def paths(self) -> Paths:
        """Found also when settings.json is broken: a running server must stay reachable while its file is being edited."""
        try:
            return paths_of(self.loaded.home, self.loaded.settings)
        except SettingsInvalid:
            home = home_of(os.environ, self.given)
            return paths_of(home, Settings(server=ServerSettings(run_dir=_run_dir(home))))

    @property
    def running(self) -> bool:
        return running_pid(self.paths.lock) is not None

    def client(self) -> ControlClient:
        """Raises `NotRunning`."""
        return ControlClient(self.paths.lock, self.paths.control)

    def model_dirs(self) -> list[Path]:
        """Where models are looked for, the server's own directory first."""
        return [self.paths.models, *(Path(d).expanduser().absolute() for d in self.loaded.settings.model.model_dirs)]

    def either(self, with_server: Callable[[ControlClient], T], without: Callable[[], T]) -> T:
        """Asks the server when there is one, else does the same on the files."""
        try:
            client = self.client()
        except NotRunning:
            return without()
        with client:
            return with_server(client)


def _run_dir(home: Path) -> str | None:
    if given := os.environ.get("OMLX_RUN_DIR"):
        return given
    section = read_file(home / FILE, []).get("server")
    given = section.get("run_dir") if isinstance(section, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # a broken file may hold anything
    return given if isinstance(given, str) else None


pass_home = click.make_pass_decorator(Home, ensure=True)
