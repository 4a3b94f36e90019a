"""Looking at a server so often that starting `omlxctl` each time would disturb what is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from supervisor.client import ControlClient
from tests.stands.patience import patient_s
from tests.stands.server import Server

SETTLED_S = 10.0


class Looking(ControlClient):
    """One connection to the control socket; use as a context manager. Not to be shared between threads."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.home / "run" / "omlxd.lock", server.home / "run" / "control.sock")
        self._server = server

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in self.status()["models"] if m["id"] == name)

    def child(self, name: str) -> dict[str, Any]:
        return next(c for c in self.status()["children"] if c["name"] == name)

    def until(self, model: str, condition: Callable[[dict[str, Any]], object], within_s: float = 30) -> dict[str, Any]:
        """The model's status once it is as wanted."""
        began_at = time.monotonic()
        while not condition(found := self.model(model)):
            assert time.monotonic() - began_at < patient_s(within_s), f"not within {within_s} s: {found}\n{self._server.said()}"
            time.sleep(0.01)
        return found

    def until_nothing_is_left(self) -> None:
        """No lease, nobody waiting, no charge without a process, no zombie."""
        began_at = time.monotonic()
        while left := self._left():
            assert time.monotonic() - began_at < patient_s(SETTLED_S), (
                f"left after {SETTLED_S} s: {left}\n{self._server.said()}"
            )
            time.sleep(0.05)

    def _left(self) -> list[str]:
        status = self.status()
        left = [f"zombie {p.pid}" for p in self._server.family() if _is_zombie(p)]
        for model in status["models"]:
            left += [f"{model['id']}: {model[kind]} {kind}" for kind in ("leases", "waiting") if model[kind]]
            if bool(model["charged_bytes"]) != bool(model["pid"]):
                left.append(f"{model['id']}: {model['charged_bytes']} bytes for process {model['pid']}")
        if status["charged_bytes"] != sum(model["charged_bytes"] for model in status["models"]):
            left.append("the sum of the charges")
        return left


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
