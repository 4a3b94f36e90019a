"""A step of the model that fails once or always, hangs, or loses the GPU: what the client, the log and the next request get."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stands.server import Server, running
from tests.stands.troubled_model import FAIL, GPU, HANG, make_trouble, troubled_model
from worker.faults import EXIT_FAILED, EXIT_GPU_FAULT

NUMBERS = itertools.count()
SETTINGS = {
    "model": {"trust_remote_code": True},
    "scheduler": {"stalled_step_s": 1},
    "timers": {"no_progress_s": 6, "crash_window_s": 0.5, "backoff_first_s": 0.05},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return troubled_model(tmp_path_factory.mktemp("models") / "troubled")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running({"troubled": model}, SETTINGS) as server:
        yield server


def ask(server: Server) -> tuple[int, object]:
    """Another prompt every time: the same one would be refused once it has cost two workers."""
    answer = server.chat("troubled", f"hello {next(NUMBERS)}", max_tokens=3)
    return answer.status, answer.json().get("error", {}).get("code")


def log_of(server: Server, name: str) -> str:
    return server.ctl("logs", name, "-n", "2000").stdout


def test_a_step_that_fails_costs_its_request_and_one_that_always_fails_the_worker(server: Server, model: Path) -> None:
    assert ask(server) == (200, None)
    pid = server.pid_of("troubled")
    make_trouble(model, FAIL)
    assert [ask(server), ask(server)] == [(500, "internal"), (200, None)]
    assert server.pid_of("troubled") == pid
    make_trouble(model, FAIL, FAIL, FAIL)
    assert [ask(server), ask(server)] == [(500, "internal"), (500, "internal")]
    assert ask(server)[0] >= 500
    server.wait_for(lambda: f"worker {pid} ended: exit code {EXIT_FAILED}" in log_of(server, "omlxd"), 10, "the worker is gone")
    assert ask(server) == (200, None)


def test_a_lost_gpu_ends_the_worker_at_once_under_its_own_code_and_the_request_is_served_by_the_next(
    server: Server, model: Path
) -> None:
    assert ask(server) == (200, None)
    pid = server.pid_of("troubled")
    make_trouble(model, GPU)
    assert ask(server) == (200, None)
    assert f"worker {pid} ended: exit code {EXIT_GPU_FAULT}" in log_of(server, "omlxd")
    assert "gpu_fault: the GPU failed: [METAL]" in log_of(server, "omlxd")


def test_a_step_that_hangs_is_shown_in_the_log_before_the_worker_is_killed(server: Server, model: Path) -> None:
    assert ask(server) == (200, None)
    pid = server.pid_of("troubled")
    make_trouble(model, HANG)
    assert ask(server) == (200, None), "nothing of the answer was sent, so the next worker gives it"
    assert server.pid_of("troubled") != pid
    said = log_of(server, "troubled")
    own, after = said.split("a step has been running for", 1)
    assert "in stand_still" not in own
    assert after.count("in stand_still") == 2, "once by itself, once more when it is given up"
    assert f"SIGKILL to worker {pid}" in log_of(server, "omlxd")
