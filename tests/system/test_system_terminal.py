"""A server that somebody started in a terminal ends with the terminal, and not before."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path

from tests.stands.server import OMLXCTL, Server, home_with


def test_closing_the_terminal_ends_the_server_and_a_hang_up_alone_does_not(tiny: Path) -> None:
    with home_with({"tiny": tiny}) as home:
        server = Server(home)
        server.output.touch()
        terminal, theirs = pty.openpty()
        server.process = subprocess.Popen(
            [*OMLXCTL, "serve"],
            env=server.env(),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        try:
            server.wait_for(lambda: server.process.poll() is not None or server._answers(), 30, "the server answers")
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert server.get("/health").status == 200
            os.close(terminal)
            assert server.process.wait(20) == 0
        finally:
            if server.process.poll() is None:
                server.kill()
