"""Who of the attendants is listened to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from supervisor.paths import paths_of
from supervisor.settings import Settings
from supervisor.settings_load import Loaded
from supervisor.staff import GATEWAY, Staff
from tests.supervisor.test_attendants import SLEEPS, Watched


async def test_one_that_is_gone_has_nothing_to_say_any_more(tmp_path: Path) -> None:
    """What is still on its way from it would otherwise hold for ever: its requests, and that it has clients."""
    watched = Watched(tmp_path, SLEEPS)
    shell: Any = SimpleNamespace(
        loaded=Loaded(Settings(), tmp_path, {}),
        paths=paths_of(tmp_path, Settings()),
        census=None,
        book=lambda name: None,
        attendant_lost=None,
        give_up=None,
        janitor_said=None,
    )
    staff = Staff(shell, http_fd=-1)
    staff.attendants[GATEWAY] = watched.attendant
    watched.attendant.start()
    assert staff.of(b"g.1") is watched.attendant
    watched.attendant.dismiss()
    psutil.Process(watched.attendant.pid).kill()
    await watched.until(lambda: watched.lost == ["g.1"])
    assert staff.of(b"g.1") is None
