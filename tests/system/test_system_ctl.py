"""omlxctl against the real server: each command from a shell, real processes, real exit statuses."""

import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from supervisor import ctl
from tests.stands.models import smollm2_dir, tiny_model
from tests.stands.patience import patient_s
from tests.stands.server import OMLXCTL, Server, home_with, running

DEMO = Path(__file__).resolve().parents[2] / "benchmarks" / "demo.py"


def test_models_are_loaded_listed_and_unloaded(small: Server) -> None:
    assert "idle" in small.ctl("models").stdout
    assert "tiny is loaded (pid" in small.ctl("load", "tiny").stdout
    assert small.model("tiny")["state"] == "ready"
    assert "tiny" in small.ctl("ps").stdout and "gateway" in small.ctl("ps").stdout
    assert "1 loaded: tiny" in small.ctl("status").stdout
    shown = json.loads(small.ctl("models", "show", "tiny", "--json").stdout)
    assert shown["context"] == 2048 and shown["pid"] == small.pid_of("tiny")
    assert shown["defaults"]["temperature"]["source"] == "server settings"
    assert small.ctl("unload", "tiny").stdout == "tiny is unloaded\n"
    assert small.model("tiny")["pid"] is None


def test_load_says_on_stderr_what_it_is_at(small: Server) -> None:
    stages = small.ctl("load", "tiny").stderr
    assert "loading tiny: starting" in stages and "loading tiny: weights" in stages


def test_what_the_server_does_not_know_is_exit_4(small: Server) -> None:
    verbs = ("load", "unload", "reset", "pin", "unpin", "restart", "logs")
    for words in (*((verb, "nope") for verb in verbs), ("models", "show", "nope")):
        done = small.ctl(*words, check=False)
        assert (done.returncode, "nope" in done.stderr) == (4, True), words
    assert small.ctl("run", "nope", "hi", check=False).returncode == 4


def test_run_and_chat_answer_from_the_loaded_model(tiny: Path) -> None:
    with running({"tiny": tiny}, {"sampling": {"temperature": 0, "max_tokens": 24}}) as server:
        server.ctl("load", "tiny")
        assert server.ctl("run", "Once upon a time").stdout.strip()
        asked = {"input": "one\ntwo\n", "env": server.env(), "capture_output": True, "text": True}
        done = subprocess.run([*OMLXCTL, "chat", "tiny"], **asked, timeout=patient_s(60), check=True)
        assert done.stdout.strip()


@pytest.fixture
def terse(tiny: Path, tmp_path: Path) -> Path:
    """A tiny model whose answers are short: its own default is 16 tokens."""
    path = tmp_path / "terse"
    shutil.copytree(tiny, path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 16, "do_sample": False}))
    return path


def test_a_chat_outgrows_the_context_and_goes_on(tmp_path: Path) -> None:
    narrow = tiny_model(tmp_path / "narrow", max_position_embeddings=128)
    config = json.loads((narrow / "generation_config.json").read_text())
    (narrow / "generation_config.json").write_text(json.dumps(config | {"do_sample": False}))
    with running({"narrow": narrow}) as server:
        done = subprocess.run(
            [*OMLXCTL, "chat", "narrow"],
            input="one\ntwo\n",
            env=server.env(),
            capture_output=True,
            text=True,
            timeout=patient_s(60),
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left out") == 1  # the first answer filled the context


def test_the_models_own_defaults_hold_and_show_says_so(terse: Path) -> None:
    with running({"terse": terse}) as server:
        defaults = json.loads(server.ctl("models", "show", "terse", "--json").stdout)["defaults"]
        assert defaults["max_tokens"] == {"value": 16, "source": "generation_config.json"}
        assert server.chat("terse", "hi").json()["usage"]["completion_tokens"] == 16
        first, second = (server.ctl("run", "terse", "hi").stdout for _ in range(2))
        assert first == second


def test_logs_are_printed_and_followed(small: Server) -> None:
    small.ctl("load", "tiny")
    assert small.ctl("logs", "omlxd").stdout.strip()
    follower = subprocess.Popen(
        [*OMLXCTL, "logs", "omlxd", "-f", "-n", "0"], env=small.env(), stdout=subprocess.PIPE, text=True
    )
    with ThreadPoolExecutor(1) as pool:  # which waits at its end for who reads: only then is the follower sure to be gone
        try:
            assert follower.stdout is not None and small.process is not None
            (small.home / "settings.json").write_text("{")
            out = follower.stdout
            line = pool.submit(lambda: next((line for line in out if "settings" in line), None))
            while not line.done():  # it may not follow yet
                small.process.send_signal(signal.SIGHUP)
                time.sleep(0.2)
            assert line.result(), "the log ended"
            follower.send_signal(signal.SIGINT)
            assert follower.wait(patient_s(10)) == 130
        finally:
            follower.kill()


def test_reload_changes_what_it_can_and_refuses_a_bad_file_whole(small: Server) -> None:
    settings = small.home / "settings.json"
    settings.write_text('{"sampling": {"temperature": 0.25}, "logging": {"log_retention_days": 3}}')
    said = small.ctl("reload").stdout
    assert "sampling.temperature: changed" in said
    assert "logging.log_retention_days: takes effect after: omlxctl restart" in said
    settings.write_text('{"sampling": {"temperature": 9, "top_p": 9}}')
    refused = small.ctl("reload", check=False)
    assert (refused.returncode, "sampling.temperature" in refused.stderr, "sampling.top_p" in refused.stderr) == (2, True, True)
    values = json.loads(small.ctl("config", "show", "--json").stdout)["values"]
    assert values["sampling.temperature"] == 0.25


def test_added_models_are_served_and_removed_ones_are_gone(small: Server, tiny: Path) -> None:
    small.ctl("models", "add", str(tiny), "--name", "org/second")
    assert small.chat("org/second", "hi", max_tokens=4).status == 200
    small.ctl("models", "rm", "org/second", "--yes")
    assert small.chat("org/second", "hi", max_tokens=4).status == 404
    assert (tiny / "config.json").exists()


def test_a_removed_directory_is_deleted_after_its_worker_has_gone(small: Server, tiny: Path) -> None:
    shutil.copytree(tiny, small.home / "models" / "mine")
    small.ctl("models")
    small.ctl("reload")
    pid = json.loads(small.ctl("load", "mine", "--json").stdout)["pid"]
    small.ctl("models", "rm", "mine", "--yes")
    assert not (small.home / "models" / "mine").exists()
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


def test_an_import_that_fails_says_why_and_leaves_nothing(small: Server, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = small.ctl("models", "import", str(file), check=False)
    assert done.returncode in (1, 5) and "broken.gguf" in done.stderr
    assert [p.name for p in (small.home / "models").iterdir() if not p.name.startswith(".")] == ["tiny"]
    assert small.chat("tiny", "hi", max_tokens=2).status == 200


NOBODY = (
    *("load nobody", "load --no-wait nobody", "unload nobody", "pin nobody", "unpin nobody", "reset nobody", "restart nobody"),
    *("models show nobody", "models rm --yes nobody", "apply nobody p", "logs nobody", "trace nobody", "cache explain nobody"),
    "cache clear --yes nobody",
)


def test_what_is_not_there_is_4_for_every_command_and_json_for_those_that_asked(
    small: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in small.env().items():
        monkeypatch.setenv(name, value)
    for line in NOBODY:
        monkeypatch.setattr("sys.argv", ["omlxctl", *line.split(), "--json"])
        status = ctl._run(ctl.omlxctl)  # pyright: ignore[reportPrivateUsage]
        printed = capsys.readouterr()
        assert status == 4, (line, printed)
        error = json.loads(printed.out)["error"]
        assert error["exit_status"] == 4 and "nobody" in error["message"] and printed.err, line
    done = small.ctl("load", "nobody", "--json", check=False)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (4, "model_not_found")


def test_serve_preloads_the_models_it_is_given(tiny: Path) -> None:
    with running({"tiny": tiny}, args=("tiny",)) as server:
        server.wait_for(lambda: server.model("tiny")["state"] == "ready", 20, "tiny is loaded")


def test_stop_returns_when_every_process_is_gone(small: Server) -> None:
    small.ctl("load", "tiny")
    family = small.family()
    assert len(family) >= 4
    small.ctl("stop")
    small.process.wait(patient_s(5))
    assert [p for p in family if p.is_running() and p.status() != "zombie"] == []
    assert small.ctl("status", check=False).returncode == 3
    assert small.ctl("logs", "omlxd").stdout.strip()


def test_a_second_server_names_the_first(small: Server) -> None:
    done = small.ctl("serve", check=False)
    assert done.returncode != 0
    assert str(small.status()["pid"]) in done.stderr


def test_serve_with_wrong_settings_lists_them_and_starts_nothing() -> None:
    with home_with({}) as home:
        server = Server(home, {"server": {"port": "x"}, "smapling": {}})
        done = subprocess.run([*OMLXCTL, "serve"], env=server.env() | {"OMLX_PORT": "-1"}, capture_output=True, text=True)
        assert done.returncode == 2
        assert "server.port" in done.stderr and "smapling: unknown section (did you mean sampling?)" in done.stderr
        assert not (home / "run").exists()


@pytest.mark.real
def test_the_demo_passes_and_leaves_nothing_running() -> None:
    with home_with({"SmolLM2-135M-Instruct": smollm2_dir()}) as home:
        done = subprocess.run([sys.executable, str(DEMO), str(home)], capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("The capital of France is Paris.") >= 2
        status = subprocess.run([*OMLXCTL, "--home", str(home), "status"], capture_output=True)
        assert status.returncode == 3
