"""What the exit status of omlxctl means, and the one place that turns an outcome into a status and a message."""

import enum
import json
import sys

import click

from supervisor.client import CallFailed, NoAnswer, NotRunning
from supervisor.ipc import PathTooLong
from supervisor.paths import HomeUnusable
from supervisor.settings_load import SettingsInvalid


class Exit(enum.IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    NOT_FOUND = 4
    REFUSED = 5
    INTERRUPTED = 130


MANUAL = """\b
Exit status, of every command:
  0    done
  1    it failed; the message says why
  2    the command line or a setting is wrong
  3    the server is not running
  4    there is no such model, log, file or request
  5    the server is there but refuses (too large, busy, not allowed)
  130  interrupted with Ctrl-C

\b
With --json a failure is an object on standard output, too:
  {"error": {"code": "model_not_found", "message": "…", "exit_status": 4}}
"""

_OF_CODE = {
    "model_not_found": Exit.NOT_FOUND,
    "not_found": Exit.NOT_FOUND,
    "bad_request": Exit.USAGE,
    "settings_invalid": Exit.USAGE,
    "unknown_kind": Exit.FAILED,
    "not_allowed": Exit.REFUSED,
    "model_too_large": Exit.REFUSED,
    "kv_too_large": Exit.REFUSED,
    "context_length_exceeded": Exit.REFUSED,
    "queue_full": Exit.REFUSED,
    "busy": Exit.REFUSED,
    "exists": Exit.REFUSED,
    "poison": Exit.REFUSED,
    "shutting_down": Exit.REFUSED,
}


class CommandFailed(click.ClickException):
    """A command's own bad end: what to print, and the status."""

    def __init__(self, message: str, status: Exit = Exit.FAILED, *, answered: bool = False, code: str = "") -> None:
        """`answered`: what was asked for is on standard output already. `code`: the server's, for what it refused."""
        super().__init__(message)
        self.status = status
        self.answered = answered
        self.code = code


def status_of_code(code: str) -> Exit:
    """The exit status for an outcome of the protocol, wherever it came from (control socket or HTTP)."""
    return _OF_CODE.get(code, Exit.FAILED)


def report(problem: BaseException, *, as_json: bool = False) -> Exit:
    """Prints `problem` for a person, and for a program as well, and returns the status. Raises what is a bug."""
    status = _told(problem)
    is_answered = isinstance(problem, CommandFailed) and problem.answered
    if as_json and not is_answered and not isinstance(problem, BrokenPipeError):
        code = problem.code if isinstance(problem, CallFailed) else status.name.lower()
        message = problem.message if isinstance(problem, click.ClickException) else str(problem) or status.name.lower()
        error = {"code": code, "message": message, "exit_status": int(status)}
        click.echo(json.dumps({"error": error}, ensure_ascii=False))
    return status


def _told(problem: BaseException) -> Exit:
    match problem:
        case CommandFailed():
            return _say(problem.message, status=problem.status)
        case click.ClickException():
            problem.show()
            return Exit(problem.exit_code)
        case click.Abort() | KeyboardInterrupt():
            return Exit.INTERRUPTED
        case SettingsInvalid():
            return _say("the settings are not valid:", *problem.problems, status=Exit.USAGE)
        case NotRunning():
            return _say(str(problem), status=Exit.NOT_RUNNING)
        case CallFailed():
            return _say(problem.message, status=status_of_code(problem.code))
        case NoAnswer() | HomeUnusable() | PathTooLong():
            return _say(str(problem), status=Exit.FAILED)
        case BrokenPipeError():  # `omlxctl logs … | head`
            sys.stdout = None
            return Exit.FAILED
        case _:
            raise problem


def _say(first: str, *more: str, status: Exit) -> Exit:
    click.echo(f"Error: {first}", err=True)
    for line in more:
        click.echo(f"  {line}", err=True)
    return status
