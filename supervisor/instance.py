"""One server per home: a lock held for life, taken before any socket is bound: a second bind would steal the first's."""

import fcntl
import os
import time
from pathlib import Path

LOOKERS_S = 1.0
LOOKERS_TRIES = 200
"""Whoever asks whether a server runs holds the lock, shared, for microseconds. At least so many tries: where this process
starves, a second may pass between two of them.
"""


class AlreadyRunning(Exception):
    """Another server holds this run directory."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"omlxd is already running (pid {pid or 'unknown'}); stop it with: omlxctl stop")
        self.pid = pid


class InstanceLock:
    """An exclusive flock with the holder's pid inside. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path, inherited: int | None = None) -> None:
        """`inherited` is the descriptor of this process's life before, if it holds that lock. Raises `AlreadyRunning`."""
        if inherited is not None:
            if _is_file(inherited, path):
                self._fd = inherited
                return
            os.close(inherited)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline, tries = time.monotonic() + LOOKERS_S, 0
        while not _locked(self._fd, fcntl.LOCK_EX):
            tries += 1
            if not _locked(self._fd, fcntl.LOCK_SH) or (tries >= LOOKERS_TRIES and time.monotonic() > deadline):
                pid = _pid_in(self._fd)
                os.close(self._fd)
                raise AlreadyRunning(pid)
            time.sleep(0.001)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def fd(self) -> int:
        return self._fd

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def running_pid(path: Path) -> int | None:
    """The pid of the server that holds the lock, or None when no server runs."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _locked(fd, fcntl.LOCK_SH) else _pid_in(fd)
    finally:
        os.close(fd)


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
