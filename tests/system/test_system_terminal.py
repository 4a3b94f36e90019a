"""omlxd and a terminal: a server that somebody started in one ends with it, and not before; what omlxctl draws on one."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path

from tests.stands.patience import patient_s
from tests.stands.server import OMLXCTL, START_S, Server, home_with


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
            server.wait_for(lambda: server.process.poll() is not None or server._answers(), START_S, "the server answers")
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert server.get("/health").status == 200
            os.close(terminal)
            assert server.process.wait(patient_s(20)) == 0
        finally:
            if server.process.poll() is None:
                server.kill()


def test_a_load_draws_a_bar_on_a_terminal_and_wipes_it_away(small: Server) -> None:
    terminal, theirs = pty.openpty()
    done = subprocess.Popen([*OMLXCTL, "load", "tiny"], env=small.env(), stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while piece := os.read(terminal, 4096):
            drawn += piece
    os.close(terminal)
    out, _ = done.communicate(timeout=patient_s(30))
    assert done.returncode == 0 and "tiny is loaded" in out and "\033" not in out
    assert b"\r\033[Kloading tiny: weights [" in drawn and b"%" in drawn
    assert drawn.endswith(b"\r\033[K")
