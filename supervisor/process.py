"""One child process: started with a lifeline, its output in a log book, its exit reported once, its signals sent to it alone.

The supervisor holds the only write end of a child's lifeline pipe, so a child sees end of file when the supervisor is gone,
however it went. Workers share the supervisor's process group, for launchd's clean-up to reach them: never signal the group.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from supervisor.census import Census
from supervisor.logs import LogBook

READ_BYTES = 65536
LAST_READS = 16
"""A pipe holds a mebibyte at most; more than that after the exit comes from a descendant that never stops."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: one of the two is set."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        return f"exit code {self.code}"


class Child:
    """A running process. `on_exit` is called on the event loop after the last of its output was read."""

    def __init__(
        self,
        book: LogBook,
        census: Census,
        on_exit: Callable[[Exit], None],
        *,
        command: Callable[[int], Sequence[str]],
        fds: Sequence[int] = (),
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        """`command` gets the number of the lifeline's read end and returns the whole command line.

        `on_output` receives standard output instead of the log book, for a child that reports in JSON lines.
        Raises OSError when no process can be had.
        """
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        read_end, self._lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command(read_end),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if on_output else subprocess.STDOUT,
                pass_fds=(read_end, *fds),
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.pid = self._popen.pid
        self._book = book
        self._census = census
        self._watch()
        self._census.born(self.pid)
        self._sinks: dict[int, Callable[[bytes], None]] = {}
        if self._popen.stdout is not None:
            self._read(self._popen.stdout.fileno(), on_output or book.feed)
        if self._popen.stderr is not None:
            self._read(self._popen.stderr.fileno(), book.feed)

    def signal(self, number: int) -> None:
        """Sends a signal unless the process has been reaped."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process and everything it started."""
        with contextlib.suppress(psutil.Error):
            for descendant in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
        self.signal(signal.SIGKILL)

    def tell(self, line: bytes) -> bool:
        """Writes to the lifeline, for a child that reads more than its end there; False if that is not possible now."""
        try:
            os.set_blocking(self._lifeline, False)
            return os.write(self._lifeline, line) == len(line)
        except OSError:
            return False

    def cut_lifeline(self) -> None:
        """What the child would see if the supervisor died."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _watch(self) -> None:
        try:
            threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()
        except RuntimeError as e:  # no more threads to be had: a child whose end nobody sees is not wanted
            self._popen.kill()
            self._popen.communicate()
            self.cut_lifeline()
            raise OSError(errno.EAGAIN, str(e)) from e

    def _read(self, fd: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._sinks[fd] = sink
        self._loop.add_reader(fd, self._readable, fd)

    def _readable(self, fd: int) -> bool:
        """Takes what is there; False once there is nothing or never will be."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._sinks[fd](data)
        else:
            self._loop.remove_reader(fd)
        return bool(data)

    def _wait(self) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the supervisor is leaving
            self._loop.call_soon_threadsafe(self._reaped)

    def _reaped(self) -> None:
        for fd in self._sinks:
            for _ in range(LAST_READS):
                if not self._readable(fd):
                    break
            self._loop.remove_reader(fd)
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        self._book.end()
        self.cut_lifeline()
        self._census.died(self.pid)
        code = self._popen.returncode
        self._on_exit(Exit(code, None) if code >= 0 else Exit(None, -code))
