"""What launchd and systemd start: the server, with an exit code that says whether starting it again would help.

`python -P -m supervisor.service_main`. Exit code 0: asked to stop, or refused for a reason that stays (the port or the home is
taken, the settings are wrong), which the last lines of the log name. Anything else is a crash, and the keeper starts it again.
"""

import io
import os
import sys
import time

from supervisor.build import build
from supervisor.settings_load import SettingsInvalid, load


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # into a file they would keep the last words of a crash to themselves
            stream.reconfigure(line_buffering=True)
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} omlxd {build()} starts as a service (pid {os.getpid()})")
    try:
        return _serve()
    except SettingsInvalid as e:
        print("omlxd: the settings are not valid; it stays stopped until: omlxctl service start", file=sys.stderr)
        for problem in e.problems:
            print(f"  {problem}", file=sys.stderr)
        return 0


def _serve() -> int:
    """Raises `SettingsInvalid`, also for names that mean two things only beside the models that are there."""
    loaded = load(os.environ)
    from supervisor import daemon  # late: wrong settings are told before anything else can go wrong

    return daemon.run(loaded, as_service=True)


if __name__ == "__main__":
    sys.exit(main())
