"""Runs the import process for `omlxctl models import` when there is no server to do it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from supervisor.ctl_exit import CommandFailed, Exit
from supervisor.paths import Paths, prepare

REFUSED = 65
"""The import process's status for a file that can never be imported."""
STDERR_LINES = 20


def run(paths: Paths, source: Path, name: str, dtype: str, on_note: Callable[[dict[str, object]], None]) -> dict[str, object]:
    """Imports `source`, passing on progress as the verb `import` does; the result is that verb's too.

    Raises:
        CommandFailed: with the import's own message, or the last lines it printed.
    """
    prepare(paths)
    command = [sys.executable, "-P", "-m", "worker.gguf_import", "--source", str(source)]
    command += ["--models-dir", str(paths.models), "--name", name, "--dtype", dtype]
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            last = _follow(process, on_note)
            status = process.wait()
        finally:
            if process.poll() is None:  # Ctrl-C: it ignores that itself and cleans up on SIGTERM
                process.terminate()
                process.wait()
        if status == 0 and last.get("stage") == "done":
            return {key: last[key] for key in ("path", "dtype", "bytes", "sample")} | {"model": name}
        stderr.seek(0)
        raise _failure(last, status, stderr.read())


def _follow(process: "subprocess.Popen[str]", on_note: Callable[[dict[str, object]], None]) -> dict[str, object]:
    last: dict[str, object] = {}
    assert process.stdout is not None
    for line in process.stdout:
        try:
            last = cast("dict[str, object]", json.loads(line))
        except ValueError:
            continue  # a library printed something
        if "stage" in last:
            on_note(last)
    return last


def _failure(last: dict[str, object], status: int, stderr: str) -> CommandFailed:
    error = last.get("error")
    if isinstance(error, dict):
        message = str(cast("dict[str, object]", error).get("message"))
        return CommandFailed(message, Exit.REFUSED if status == REFUSED else Exit.FAILED)
    lines = "\n".join(stderr.strip().splitlines()[-STDERR_LINES:])
    return CommandFailed(f"the import process ended with status {status}\n{lines}".rstrip())
