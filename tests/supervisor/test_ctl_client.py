"""The client of control.sock: how it tells a server that is not there from one that is silent or refuses."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.client import CallFailed, ControlClient, NoAnswer, NotRunning
from supervisor.protocol import Problem, encode
from tests.stands.patience import patient_s
from tests.supervisor.ctl_stand import ScriptedSupervisor, Step


def client(home: Path) -> ControlClient:
    return ControlClient(home / "run" / "omlxd.lock", home / "run" / "control.sock")


def test_without_a_server_it_says_so_at_once(home: Path) -> None:
    started = time.monotonic()
    with pytest.raises(NotRunning, match="start it with: omlxctl serve"):
        client(home)
    assert time.monotonic() - started < patient_s(0.5)


def test_a_socket_file_left_behind_is_not_a_server(home: Path, server: ScriptedSupervisor) -> None:
    server.release()
    with pytest.raises(NotRunning):
        client(home)


def test_notes_come_in_order_before_the_result(home: Path, server: ScriptedSupervisor) -> None:
    server.answers("load", {"done": 1}, {"done": 2}, {"model": "tiny"})
    notes: list[object] = []
    with client(home) as control:
        assert control.call("load", {"model": "tiny"}, notes.append) == {"model": "tiny"}
    assert notes == [{"done": 1}, {"done": 2}]
    assert server.calls == [("load", {"model": "tiny"})]


def test_a_refusal_carries_code_and_message(home: Path, server: ScriptedSupervisor) -> None:
    server.answers("load", ("model_too_large", "40 GiB of 16"))
    with client(home) as control, pytest.raises(CallFailed, match="40 GiB of 16") as refused:
        control.call("load")
    assert refused.value.code == "model_too_large"


def test_a_server_that_lives_but_is_silent_is_given_up(home: Path, server: ScriptedSupervisor) -> None:
    server.answers("status", None)
    with client(home) as control, pytest.raises(NoAnswer, match="does not answer"):
        control.call("status", timeout_s=0.3)


def test_a_long_call_ends_when_the_server_does(home: Path, server: ScriptedSupervisor) -> None:
    server.answers_and_ends("load", {"stage": "weights"}, None, after_s=0.3)
    with client(home) as control, pytest.raises(NotRunning):
        control.call("load", timeout_s=None)


def test_a_long_call_to_a_server_that_hangs_ends(
    home: Path, server: ScriptedSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.client.FIRST_ANSWER_S", 0.2)
    monkeypatch.setattr("supervisor.client.SHORT_S", 1.5)
    server.answers("load", {"stage": "weights"}, None)
    server.answers("ping", None)
    with client(home) as control, pytest.raises(NoAnswer, match="does not answer"):
        control.call("load", timeout_s=None)
    first, *others = [verb for verb, _ in server.calls]
    assert first == "load" and set(others) == {"ping"}


def test_a_long_call_that_has_nothing_to_tell_is_waited_for_while_the_server_answers(
    home: Path, server: ScriptedSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.client.FIRST_ANSWER_S", 0.1)
    quiet = threading.Event()
    server.answers("load", None)

    def pinged(_: dict[str, object]) -> Iterator[Step]:
        if len(server.calls) > 4:
            quiet.set()
            server.release()
        yield {}

    server.scripts["ping"] = pinged
    with client(home) as control, pytest.raises(NotRunning):
        control.call("load", timeout_s=None)
    assert quiet.is_set()


def test_a_long_call_ends_when_the_server_has_started_again_in_place(home: Path, server: ScriptedSupervisor) -> None:
    server.answers("logs", {"lines": ["a"]}, None)
    server.answers("ping", {})
    with client(home) as control, pytest.raises(CallFailed, match="started again") as failed:
        control.call("logs", on_note=lambda _: threading.Timer(0.3, server.start_again).start(), timeout_s=None)
    assert failed.value.code == "restarted"


def test_a_problem_ends_the_call(home: Path, server: ScriptedSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(code="unknown_kind", message="unknown message kind 'call'")
    monkeypatch.setattr(server, "_messages", lambda _call: iter([problem]))
    with client(home) as control, pytest.raises(CallFailed, match="unknown message kind"):
        control.call("status")


def test_messages_of_another_version_are_named_as_such(
    home: Path, server: ScriptedSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.supervisor.ctl_stand.encode", lambda message: [b"novel", encode(message)[1]])
    with client(home) as control, pytest.raises(CallFailed, match="another version"):
        control.call("status")
