"""The archive of `omlxctl doctor --bundle`: what helps to understand a server from afar, and nothing that was said to a model.

Logs are the danger: a library may print anything. So of a log only those lines are taken that begin as our own loggers write
them, and of those only up to a length; whatever equals a secret of the settings is blotted out everywhere.
"""

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from supervisor.client import CallFailed, NoAnswer, NotRunning
from supervisor.ctl_events import told
from supervisor.ctl_home import Home
from supervisor.doctor import Finding
from supervisor.protocol import Event, plain
from supervisor.settings import leaves, value_of
from supervisor.settings_load import SettingsInvalid
from supervisor.settings_show import effective

LOG_LINES = 500
LINE_CHARS = 300
OURS = re.compile(r"\S+ (INFO|WARNING|ERROR|CRITICAL) (omlxd|fleet|staff|attendants|admin|control|store|census): ")
"""The supervisor's loggers, which see no requests: numbers, names of models and codes."""
BLOT = "***"


def write_bundle(here: Home, findings: Sequence[Finding], target: Path) -> list[str]:
    """Writes the archive, readable by its owner only; the names of the files in it. Raises OSError."""
    secrets = _secrets(here)
    names: list[str] = []
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in _files(here, findings):
            data = _blotted(text, secrets).encode()
            info = tarfile.TarInfo(f"omlxd-diagnostics/{name}")
            info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(data))
            names.append(name)
    return names


def _files(here: Home, findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    yield "doctor.json", _json([asdict(finding) for finding in findings])
    try:
        yield "settings.json", _json(effective(here.loaded))
    except SettingsInvalid as e:
        yield "settings.json", _json({"problems": e.problems})
    try:
        with here.client() as client:
            yield "state.json", _json(_without_errors(client.call("dump")))
            events = [_plain_event(event) for event in told(client, LOG_LINES)]
            yield "events.json", _json(events)
    except (NotRunning, NoAnswer, CallFailed) as e:
        yield "state.json", _json({"problem": str(e)})
    for path in sorted(here.paths.logs.glob("*.log")) if here.paths.logs.is_dir() else ():
        yield f"logs/{path.name}", own_lines(path.read_text("utf-8", "replace"))


def _plain_event(event: Event) -> dict[str, object]:
    """Reasons and errors may quote a worker: of the data only what this program chose."""
    data = {
        key: event.data[key] for key in ("state", "previous", "stage", "name", "pid", "changed", "restart") if key in event.data
    }
    return {"seq": event.seq, "ts": event.ts, "kind": event.kind, "model": event.model, "gen": event.gen, "data": data}


def own_lines(log: str) -> str:
    """The last lines that our own loggers wrote, each cut to a length."""
    lines = [line[:LINE_CHARS] for line in log.splitlines() if OURS.match(line)]
    return "\n".join(lines[-LOG_LINES:]) + "\n"


def _without_errors(dump: dict[str, object]) -> object:
    """A worker's last words are its log's last lines, whoever wrote them: of these only that there were some."""

    def clean(value: object) -> object:
        if isinstance(value, dict):
            table = cast("dict[str, object]", value)
            return {k: ("(left out)" if k in ("last_error", "error") and v else clean(v)) for k, v in table.items()}
        return [clean(item) for item in cast("list[object]", value)] if isinstance(value, list) else value

    return clean(plain(dump))


def _secrets(here: Home) -> list[str]:
    try:
        settings = here.loaded.settings
    except SettingsInvalid:
        return []
    values = [value_of(settings, leaf.path) for leaf in leaves() if leaf.setting.secret]
    return [value for value in values if isinstance(value, str) and value]


def _blotted(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, BLOT).replace(json.dumps(secret)[1:-1], BLOT)
    return text


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
