"""The supervisor from outside: children die or hang, settings change, models come and go, it is told to stop at any moment."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.stands.patience import patient_s
from tests.stands.server import OMLXCTL, Server, home_with, running
from tests.stands.tiny_gguf import write_gguf


def configure(server: Server, settings: object) -> None:
    (server.home / "settings.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))


def child(server: Server, name: str) -> dict[str, object]:
    return next(c for c in server.status()["children"] if c["name"] == name)


@contextlib.contextmanager
def in_background(server: Server, *args: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([*OMLXCTL, *args], env=server.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def process_of(server: Server, word: str) -> psutil.Process | None:
    for process in server.family():
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline():
                return process
    return None


def gone(process: psutil.Process) -> bool:
    """A zombie is gone too: who has to collect it is not ours."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


# Attendants


def test_five_deaths_of_the_gateway_in_a_minute_end_the_server_with_an_error(small: Server) -> None:
    children = small.family()[1:]
    seen: set[int] = set()
    assert small.process is not None
    for _ in range(5):
        gateway: list[psutil.Process] = []

        def comes_up(found: list[psutil.Process] = gateway) -> bool:
            process = process_of(small, "gateway")
            if process is None or process.pid in seen:
                return False
            found.append(process)
            return True

        small.wait_for(comes_up, 15, "the gateway is started again")
        seen.add(gateway[0].pid)
        gateway[0].kill()
    assert small.process.wait(timeout=patient_s(25)) == 1
    assert "the gateway died 5 times within 60 s" in small.said()
    assert all(gone(process) for process in children)


def test_the_janitor_and_the_text_worker_are_started_again(small: Server) -> None:
    for name in ("janitor", "text"):
        first = small.pid_of(name)
        os.kill(first, signal.SIGKILL)
        small.wait_for(lambda name=name, first=first: child(small, name)["pid"] not in (None, first), 10, f"a new {name}")
        small.wait_for(lambda name=name: child(small, name)["state"] == "running", 15, f"{name} runs")
        assert child(small, name)["restarts"] == 1
    assert small.chat("tiny", "hello", max_tokens=2).status == 200


def test_a_gateway_that_hangs_is_replaced(tiny: Path) -> None:
    with running({"tiny": tiny}, {"timers": {"beat_lost_s": 4}}) as server:
        first = server.pid_of("gateway")
        os.kill(first, signal.SIGSTOP)
        server.wait_for(lambda: child(server, "gateway")["pid"] not in (None, first), 20, "a new gateway")
        assert server.get("/health", timeout_s=20).status == 200


# The end, at any moment


def test_a_child_that_cannot_notice_the_end_of_its_supervisor_is_ended_by_the_next_one(small: Server) -> None:
    small.ctl("load", "tiny")
    stuck = [psutil.Process(small.pid_of(name)) for name in ("tiny", "gateway")]
    for process in stuck:
        process.suspend()  # it serves neither its lifeline nor a signal, as in a hung driver
    small.kill()
    time.sleep(0.5)
    assert not any(gone(process) for process in stuck)
    small.start()
    assert all(gone(process) for process in stuck)
    assert "had outlived the server" in small.said()
    assert small.chat("tiny", "hello", max_tokens=2).status == 200


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_may_end_in_the_middle_of_a_load(small: Server, how: signal.Signals) -> None:
    with in_background(small, "load", "tiny") as load:
        small.wait_for(lambda: small.model("tiny")["pid"], 20, "the worker is started")
        children = small.family()[1:]
        assert small.process is not None
        begun = time.monotonic()
        small.process.send_signal(how)
        assert small.process.wait(timeout=patient_s(25)) == (0 if how == signal.SIGTERM else -how)
        assert time.monotonic() - begun < patient_s(20)
        _, alive = psutil.wait_procs(children, timeout=patient_s(20))
        assert not alive
        assert load.wait(timeout=patient_s(10)) != 0
    small.start()
    small.ctl("load", "tiny")


def test_being_told_to_stop_twice_is_being_told_once(small: Server) -> None:
    small.ctl("load", "tiny")
    children = small.family()[1:]
    assert small.process is not None
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        small.process.send_signal(number)
    assert small.process.wait(timeout=patient_s(25)) == 0
    assert all(gone(process) for process in children)
    assert "Traceback" not in small.said()
    assert not list((small.home / "run").glob("*.sock"))


def test_the_end_of_the_terminal_ends_no_child(small: Server) -> None:
    """Everybody shares the supervisor's process group, so its SIGHUP reaches all of them."""
    small.ctl("load", "tiny")
    before = {name: small.pid_of(name) for name in ("gateway", "text", "tiny")}
    for pid in before.values():
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    assert {name: small.pid_of(name) for name in before} == before


# Settings


def test_a_settings_file_with_errors_changes_nothing_and_every_error_is_listed(small: Server) -> None:
    configure(small, {"auth": {"api_key": "k"}, "server": {"port": -1, "hots": "x"}, "models": {"tiny": {"context": "?"}}})
    done = small.ctl("reload", check=False)
    assert done.returncode == 2
    for part in ("server.port", "server.hots", "models.tiny.context"):
        assert part in done.stderr
    assert small.get("/v1/models").status == 200
    assert small.process is not None
    small.process.send_signal(signal.SIGHUP)
    small.wait_for(lambda: "the settings are not taken over" in small.said(), 5, "the signal was served")
    assert small.get("/v1/models").status == 200


@pytest.mark.parametrize("by", ["command", "signal"])
def test_live_settings_reach_the_running_gateway(small: Server, by: str) -> None:
    gateway = small.pid_of("gateway")
    configure(small, {"auth": {"api_key": "sesame"}, "server": {"cors_origins": ["https://example.com"]}})
    if by == "command":
        said = small.ctl("reload").stdout
        assert "auth.api_key: changed" in said and "server.cors_origins: changed" in said and "sesame" not in said
    else:
        assert small.process is not None
        small.process.send_signal(signal.SIGHUP)
    small.wait_for(lambda: small.get("/v1/models").status == 401, 5, "a key is asked for")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Authorization": "Bearer sesame", "Origin": "https://example.com"}
    answer = small.post("/v1/chat/completions", body, headers=headers)
    assert answer.status == 200
    assert {k.lower(): v for k, v in answer.headers.items()}["access-control-allow-origin"] == "https://example.com"
    assert small.pid_of("gateway") == gateway


def test_a_setting_that_applies_at_load_replaces_an_idle_worker_and_leaves_the_others(tiny: Path) -> None:
    with running({"tiny": tiny, "other": tiny}) as server:
        for name in ("tiny", "other"):
            server.ctl("load", name)
        first, other = server.pid_of("tiny"), server.pid_of("other")
        configure(server, {"models": {"tiny": {"context": 256}}})
        assert "models.tiny: changed" in server.ctl("reload").stdout
        server.wait_for(lambda: server.model("tiny")["pid"] != first, 15, "the old worker goes")
        assert server.chat("tiny", "hello", max_tokens=2).status == 200
        assert server.model("tiny")["context"] == 256
        assert server.chat("tiny", "word " * 300, max_tokens=2).status == 400
        assert server.pid_of("other") == other


def test_a_setting_that_applies_at_start_says_so_until_then(small: Server) -> None:
    port = small.port
    configure(small, {"scheduler": {"max_queue": 3}})
    for _ in range(2):
        assert "scheduler.max_queue: takes effect after: omlxctl restart" in small.ctl("reload").stdout
    shown = json.loads(small.ctl("config", "show", "--json").stdout)
    assert shown["values"]["scheduler.max_queue"] != 3
    assert small.status()["port"] == port


def test_a_cache_that_is_switched_off_and_on_takes_its_janitor_along(small: Server) -> None:
    def names() -> set[str]:
        return {c["name"] for c in small.status()["children"]}

    janitor = psutil.Process(small.pid_of("janitor"))
    configure(small, {"cache": {"enabled": False}})
    small.ctl("reload")
    assert names() == {"gateway", "text"}
    small.wait_for(lambda: not janitor.is_running(), 5, "the janitor goes")
    configure(small, {})
    small.ctl("reload")
    assert names() == {"gateway", "text", "janitor"}
    assert small.pid_of("janitor") != janitor.pid


@pytest.mark.parametrize("level", ["error", "debug"])
def test_the_log_level_is_honoured_by_every_process(tiny: Path, level: str) -> None:
    with running({"tiny": tiny}, {"server": {"log_level": level}}) as server:
        server.chat("tiny", "hello", max_tokens=2)
        server.ctl("unload", "tiny")
        for name in ("omlxd", "gateway", "text", "tiny"):
            if level == "debug":
                server.wait_for(lambda name=name: is_chatty(server, name), 10, f"{name} says what it does")
            else:
                assert not is_chatty(server, name)


def is_chatty(server: Server, name: str) -> bool:
    lines = server.ctl("logs", name).stdout
    return "INFO" in lines or "DEBUG" in lines


def test_the_log_level_can_be_changed_while_the_server_runs(small: Server) -> None:
    configure(small, {"server": {"log_level": "error"}})
    small.ctl("reload")
    before = small.said().count("INFO")
    small.ctl("load", "tiny")
    assert small.said().count("INFO") == before
    assert "INFO" not in small.ctl("logs", "tiny").stdout


# Models


def test_models_come_and_go_while_the_server_runs(small: Server, tiny: Path) -> None:
    (small.home / "models" / "org").mkdir()
    (small.home / "models" / "org" / "late").symlink_to(tiny)
    assert small.chat("org/late", "hello", max_tokens=2).status == 404
    small.ctl("reload")
    assert small.chat("org/late", "hello", max_tokens=2).status == 200
    assert "org/late" in {m["id"] for m in small.get("/v1/models").json()["data"]}
    worker = small.pid_of("org/late")
    small.ctl("models", "rm", "org/late", "--yes")
    assert not psutil.pid_exists(worker)
    assert small.chat("org/late", "hello", max_tokens=2).status == 404
    assert (tiny / "config.json").exists()


def test_a_loaded_model_whose_files_are_taken_away_is_unloaded_at_the_next_look(small: Server) -> None:
    small.ctl("load", "tiny")
    worker = small.pid_of("tiny")
    (small.home / "models" / "tiny").unlink()
    small.ctl("reload")
    small.wait_for(lambda: not psutil.pid_exists(worker), 15, "its worker goes")
    assert small.status()["models"] == []


def test_a_reload_finds_what_came_back_as_it_was_and_what_replaced_a_newer_file(tiny: Path, tmp_path: Path) -> None:
    """A disk that was unplugged and is there again; a chat template from a backup, older than everything else."""
    path = Path(shutil.copytree(tiny, tmp_path / "m"))
    with running({"m": path}) as server:
        path.rename(tmp_path / "unplugged")
        assert server.chat("m", "hello", max_tokens=2).status == 400
        (tmp_path / "unplugged").rename(path)
        server.ctl("reload")
        before = server.chat("m", "hello", max_tokens=2).json()["usage"]["prompt_tokens"]
        config = path / "tokenizer_config.json"
        config.write_text(config.read_text().replace("<|im_start|>assistant", "<|im_start|>the long way from here to there"))
        os.utime(config, (0, 0))
        server.ctl("reload")
        assert server.chat("m", "hello", max_tokens=2).json()["usage"]["prompt_tokens"] > before


def test_the_same_model_removed_by_two_at_once_is_removed_once_and_both_are_answered(small: Server) -> None:
    small.ctl("load", "tiny")
    codes: list[int] = []

    def remove() -> None:
        codes.append(small.ctl("models", "rm", "tiny", "--yes", check=False).returncode)

    both = [threading.Thread(target=remove) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(timeout=patient_s(30))
    assert 0 in codes and len(codes) == 2
    assert small.status()["models"] == []
    assert "Traceback" not in small.said()


def test_what_cannot_be_loaded_at_the_start_is_said_and_the_rest_is_served(tiny: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with running({"tiny": tiny, "damaged": damaged}, args=("tiny", "damaged", "absent")) as server:
        server.wait_for(lambda: server.model("tiny")["state"] == "ready", 30, "the one that can be loaded is")
        assert "damaged is to be loaded at start, but it cannot be served" in server.said()
        assert "absent is to be loaded at start, but there is no such model" in server.said()


# Imports


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "smol.gguf")


@pytest.fixture
def empty() -> Iterator[Server]:
    with home_with({}) as home:
        server = Server(home)
        server.start()
        try:
            yield server
        finally:
            if server.process is not None and server.process.poll() is None:
                server.stop()


def importing(server: Server) -> psutil.Process:
    """The import's process, once it has begun to write."""
    deadline = time.monotonic() + patient_s(20)
    while not list((server.home / "models").glob(".importing-*")):  # no pause: a small import is over soon
        assert time.monotonic() < deadline
    process = process_of(server, "worker.gguf_import")
    assert process is not None
    return process


def test_an_import_becomes_a_model_that_answers(empty: Server, gguf: Path) -> None:
    done = empty.ctl("models", "import", str(gguf), "--name", "smol", "--dtype", "float16")
    assert "smol is imported" in done.stdout
    assert [m["id"] for m in empty.status()["models"]] == ["smol"]
    assert empty.chat("smol", "hello", max_tokens=2).status == 200
    again = empty.ctl("models", "import", str(gguf), "--name", "smol", check=False)
    assert again.returncode != 0 and "exists already" in again.stderr


def test_a_killed_import_leaves_nothing_and_is_answered_with_an_error(empty: Server, gguf: Path) -> None:
    with in_background(empty, "models", "import", str(gguf), "--name", "smol") as client:
        importing(empty).kill()
        _, said = client.communicate(timeout=patient_s(20))
        assert client.returncode == 1
    assert "killed by SIGKILL" in said
    assert list((empty.home / "models").iterdir()) == []
    assert empty.status()["charged_bytes"] == 0
    assert empty.status()["models"] == []


def test_a_stop_in_the_middle_of_an_import_is_quick_and_leaves_nothing(empty: Server, gguf: Path) -> None:
    with in_background(empty, "models", "import", str(gguf), "--name", "smol") as client:
        process = importing(empty)
        begun = time.monotonic()
        assert empty.stop() == 0
        assert time.monotonic() - begun < patient_s(10)
        assert gone(process)
        client.communicate(timeout=patient_s(10))
        assert client.returncode != 0
    assert list((empty.home / "models").iterdir()) == []


def test_what_an_import_left_behind_when_all_was_killed_goes_at_the_next_start(empty: Server, gguf: Path) -> None:
    with in_background(empty, "models", "import", str(gguf), "--name", "smol"):
        process = importing(empty)
        process.suspend()
        process.kill()
        empty.kill()
    left = list((empty.home / "models").glob(".importing-*"))
    (empty.home / "models" / ".importing-old-1").mkdir()
    assert left
    empty.start()
    empty.wait_for(lambda: not list((empty.home / "models").iterdir()), 10, "the leftovers are removed")


def test_an_import_of_something_else_is_refused_with_the_reason(empty: Server, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    done = empty.ctl("models", "import", str(tmp_path / "x.gguf"), check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr and done.stderr.strip()
    assert list((empty.home / "models").iterdir()) == []
    assert empty.chat("import:x", "hello").status == 404
