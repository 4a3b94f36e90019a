"""What every test may rely on: whether the real model is worth running here, and how Hypothesis draws."""

import asyncio
import ctypes.util
import signal
import sys
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from worker.blas import load_openblas

load_openblas()
"""Before anything imports MLX: afterwards this process would keep the slow BLAS for good."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control ignores it for what runs in its background, and so would every program started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("same"), derandomize=False, max_examples=2000)
settings.load_profile("same")
"""Every run draws the same, and none fails because other programs have the cores. New draws, many of them, when one looks for
bugs: `pytest --hypothesis-profile explore`."""

NO_FAST_BLAS = "OpenBLAS is not installed: tests with a real model are left out (sudo apt install libopenblas0-pthread)"


ON_UVLOOP = ("gateway", "worker")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What runs on uvloop in service is tested on it: a socket that is half-closed, full or gone is its business."""
    if item.path.name == "test_ipc.py":  # the supervisor's end of a socket and the others'
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.path.parent.name in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


def fast_blas() -> bool:
    return sys.platform != "linux" or ctypes.util.find_library("openblas") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not fast_blas():
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason=NO_FAST_BLAS))
