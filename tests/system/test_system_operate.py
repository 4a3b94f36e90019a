"""omlxctl for operators, against the real server: pins, time to live, names, events, restarts, dumps, changing settings."""

import json
import os
import signal
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.stands.patience import patient_s
from tests.stands.server import OMLXCTL, Server, running

LARGE = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 250,
    "n": 8,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""More than a megabyte, most of it numbers."""


def only_read(server: Server) -> bool:
    status = server.get("/api/status").json()
    held = (status["gateway"]["requests"], status["gateway"]["inflight"])
    return status["models"][0]["state"] == "ready" and held == (1, 0)


def configure(server: Server, settings: object) -> None:
    (server.home / "settings.json").write_text(json.dumps(settings))
    server.ctl("reload")


def state(server: Server) -> object:
    return server.model("tiny")["state"]


def test_an_idle_model_is_unloaded_after_its_time_to_live_and_a_pinned_one_is_not(small: Server) -> None:
    configure(small, {"model": {"ttl_s": 600}, "models": {"tiny": {"ttl_s": 1}}})
    small.ctl("load", "tiny")
    small.wait_for(lambda: state(small) == "idle", 10, "the idle model is unloaded")
    assert "idle for 1 s" in small.ctl("logs", "omlxd").stdout
    assert "pinned" in small.ctl("pin", "tiny").stdout
    small.ctl("load", "tiny", "--pin")
    time.sleep(2.5)
    assert state(small) == "ready" and small.model("tiny")["pinned"]
    assert "pinned" in small.ctl("status").stdout
    small.ctl("unpin", "tiny")
    small.wait_for(lambda: state(small) == "idle", 10, "it goes once it is not pinned any more")


def test_a_time_to_live_never_ends_a_running_request(tiny: Path) -> None:
    with running({"tiny": tiny}, {"models": {"tiny": {"ttl_s": 0.1}}}) as server:
        answer = server.chat("tiny", "hello", max_tokens=400)
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 400
        server.wait_for(lambda: state(server) == "idle", 10, "it is unloaded afterwards")
        assert server.chat("tiny", "hello", max_tokens=4).status == 200


def test_a_time_to_live_runs_from_the_last_byte_that_was_sent(tiny: Path) -> None:
    with running({"tiny": tiny}, {"models": {"tiny": {"ttl_s": 0.5}}}) as server:
        body = json.dumps(LARGE).encode()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536
            )  # small segments make for small buffers at the server, too
            link.settimeout(60)
            link.connect(("127.0.0.1", server.port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.wait_for(lambda: only_read(server), 60, "the worker is done, and its client is not")
            pid = server.pid_of("tiny")
            time.sleep(2)
            assert server.pid_of("tiny") == pid and state(server) == "ready", "its client has not got the answer yet"
            taken = 0
            while data := link.recv(1 << 20):
                taken += len(data)
            assert taken > 1 << 20
        server.wait_for(lambda: state(server) == "idle", 10, "it is unloaded afterwards")


def test_a_pinned_model_is_loaded_again_after_a_crash(tiny: Path) -> None:
    with running({"tiny": tiny}, {"models": {"tiny": {"pinned": True}}, "timers": {"backoff_first_s": 0.2}}) as server:
        server.ctl("load", "tiny")
        first = server.pid_of("tiny")
        os.kill(first, signal.SIGKILL)
        server.wait_for(lambda: server.model("tiny")["pid"] not in (None, first), 20, "another worker, unasked")
        server.wait_for(lambda: state(server) == "ready", 20, "it is ready")
        assert server.model("tiny")["restarts"] == 1


NAMES = {
    "model": {"default": "quick:short"},
    "models": {"tiny": {"aliases": ["quick"], "temperature": 0, "max_tokens": 9, "profiles": {"short": {"max_tokens": 3}}}},
}


def test_aliases_profiles_and_the_default_are_one_worker_without_a_reload(small: Server) -> None:
    small.ctl("load", "tiny")
    pid = small.pid_of("tiny")
    configure(small, NAMES)
    body = {"messages": [{"role": "user", "content": "hello"}]}

    def answered(name: str | None) -> tuple[object, object]:
        answer = small.post("/v1/chat/completions", body | ({"model": name} if name else {}))
        assert answer.status == 200, answer
        return answer.json()["model"], answer.json()["usage"]["completion_tokens"]

    small.wait_for(lambda: small.post("/v1/chat/completions", body).status == 200, 5, "the gateway knows the default")
    assert answered("tiny") == ("tiny", 9)
    assert answered("quick") == ("quick", 9)
    assert answered("tiny:short") == ("tiny:short", 3)
    assert answered("quick:short") == ("quick:short", 3)
    assert answered(None) == ("tiny", 3)
    assert small.post("/v1/chat/completions", body | {"model": "gpt-9"}).status == 404
    assert small.pid_of("tiny") == pid
    listed = [model["id"] for model in small.get("/v1/models").json()["data"]]
    assert listed == ["tiny", "tiny:short"]
    assert "aliases" in small.ctl("models", "show", "quick").stdout
    configure(small, {**NAMES, "model": {"default": "tiny", "fallback": True}})
    small.wait_for(lambda: small.post("/v1/chat/completions", body | {"model": "gpt-9"}).status == 200, 5, "the fall-back")
    assert answered("gpt-9") == ("tiny", 9)
    assert small.ctl("load", "gpt-9", check=False).returncode == 4, "only requests fall back"


def test_an_alias_that_is_a_models_id_is_refused_with_both_names(small: Server) -> None:
    (small.home / "settings.json").write_text('{"models": {"other": {"aliases": ["tiny"]}}}')
    done = small.ctl("reload", check=False)
    assert done.returncode == 2 and "tiny would name both other and tiny" in done.stderr
    small.stop()
    refused = small.ctl("serve", check=False)
    assert refused.returncode == 2 and "tiny would name both other and tiny" in refused.stderr


def test_a_profile_cannot_hold_what_needs_another_worker(small: Server) -> None:
    (small.home / "settings.json").write_text('{"models": {"tiny": {"profiles": {"p": {"context": 64}}}}}')
    done = small.ctl("reload", check=False)
    assert done.returncode == 2 and "models.tiny.profiles.p.context" in done.stderr


def test_events_are_printed_and_followed(small: Server) -> None:
    small.ctl("load", "tiny")
    told = [json.loads(line) for line in small.ctl("events", "--json").stdout.splitlines()]
    assert [event["seq"] for event in told] == sorted({event["seq"] for event in told})
    states = [event["data"].get("state") for event in told if event["kind"] == "slot" and event["model"] == "tiny"]
    assert [s for s in ("queued", "spawning", "loading", "ready") if s in states] == ["queued", "spawning", "loading", "ready"]
    assert len(small.ctl("events", "-n", "2").stdout.splitlines()) == 2
    children = small.ctl("events", "--json", "--kind", "child").stdout.splitlines()
    assert {json.loads(line)["kind"] for line in children} == {"child"}
    follower = subprocess.Popen([*OMLXCTL, "events", "-f", "-n", "1"], env=small.env(), stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        follower.stdout.readline()
        small.ctl("unload", "tiny")
        while "state=stopping" not in (line := follower.stdout.readline()):
            assert line, "the feed ended"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(patient_s(10)) == 130
    finally:
        follower.kill()
        follower.communicate()


def test_one_process_is_started_again_and_the_others_stay(small: Server) -> None:
    small.ctl("load", "tiny")
    before = {name: small.pid_of(name) for name in ("tiny", "gateway", "text", "janitor")}
    for name in before:
        assert "is started again (pid" in small.ctl("restart", name).stdout
        now = {each: small.pid_of(each) for each in before}
        assert [each for each in before if now[each] != before[each]] == [name]
        before = now
        small.wait_for(lambda: small.get("/health").status == 200, 10, "it serves")
    assert small.chat("tiny", "hello", max_tokens=2).status == 200
    assert small.ctl("restart", "nobody", check=False).returncode == 4


def test_restarting_the_gateway_often_is_not_a_crash_loop(small: Server) -> None:
    for _ in range(6):
        small.ctl("restart", "gateway")
    assert small.get("/health").status == 200


def test_dump_prints_the_state_and_every_process_its_stacks(small: Server) -> None:
    small.ctl("load", "tiny")
    done = small.ctl("dump")
    dumped = json.loads(done.stdout)
    assert [slot["state"] for slot in dumped["slots"]] == ["ready"]
    assert dumped["status"]["models"][0]["id"] == "tiny" and dumped["next_deadline_in_s"] > 0
    assert "omlxd, gateway, text, tiny" in done.stderr
    for name in ("gateway", "text", "tiny"):
        small.wait_for(lambda name=name: "most recent call first" in small.ctl("logs", name).stdout, 5, f"stacks of {name}")
    assert "thread MainThread" in small.ctl("logs", "omlxd").stdout
    assert small.chat("tiny", "hello", max_tokens=2).status == 200


def test_status_shows_the_sum_and_goes_on_while_it_is_watched(tiny: Path) -> None:
    with running({"tiny": tiny}, {"memory": {"measure_s": 0.2}}) as server:
        server.ctl("load", "tiny")
        server.wait_for(lambda: server.model("tiny")["measured_bytes"], 10, "the worker is measured")
        status = server.status()
        (model,) = status["models"]
        assert 20 << 20 < model["measured_bytes"] < model["charged_bytes"] == status["charged_bytes"] <= status["budget_bytes"]
        assert status["measured_bytes"] > model["measured_bytes"] and status["reserve_bytes"] > 0
        shown = server.ctl("status").stdout
        assert all(word in shown for word in ("GIVEN", "WEIGHTS", "KV", "HOT CACHE", "MEASURED", "is not for models"))
        server.wait_for(lambda: server.get("/api/status").json()["measured_bytes"], 5, "the gateway hears of it")
        api = server.get("/api/status").json()
        assert api["models"][0]["measured_bytes"] > 0 and api["reserve_bytes"] == status["reserve_bytes"]
        command = [*OMLXCTL, "status", "--watch", "--json"]
        watcher = subprocess.Popen(command, env=server.env(), stdout=subprocess.PIPE, text=True)
        try:
            assert watcher.stdout is not None
            assert [json.loads(watcher.stdout.readline())["pid"] for _ in range(2)] == [status["pid"]] * 2
        finally:
            watcher.kill()
            watcher.communicate()


def test_a_setting_is_validated_written_read_back_and_taken_over(small: Server) -> None:
    assert small.ctl("config", "set", "sampling.temperature", "0.25").stdout == "sampling.temperature is set\n"
    assert small.ctl("config", "get", "sampling.temperature").stdout == "0.25\n"
    small.ctl("config", "set", "models.tiny.aliases", '["quick"]')
    assert small.ctl("config", "get", "models.tiny.aliases").stdout == "quick\n"
    assert small.model("tiny")["aliases"] == ["quick"]
    kept = (small.home / "settings.json").read_bytes()
    for words in (("sampling.temperature", "9"), ("sampling.temprature", "1"), ("models.tiny.contxt", "1"), ("nope", "1")):
        refused = small.ctl("config", "set", *words, check=False)
        assert (refused.returncode, words[0].split(".")[-1] in refused.stderr) == (2, True), words
    assert (small.home / "settings.json").read_bytes() == kept
    assert (small.home / "settings.json").stat().st_mode & 0o077 == 0
    small.ctl("config", "set", "sampling.temperature", "auto")
    assert small.ctl("config", "get", "sampling.temperature").stdout == "1.0\n"
    small.ctl("config", "set", "auth.api_key", "sesame")
    assert "sesame" not in small.ctl("config", "get", "auth.api_key").stdout
    small.wait_for(lambda: small.get("/v1/models").status == 401, 5, "the key is asked for")
    assert "still comes from environment OMLX_PORT" in small.ctl("config", "set", "server.port", "81").stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_be_taught_the_commands(shell: str) -> None:
    env = {**os.environ, "_OMLXCTL_COMPLETE": f"{shell}_source"}
    done = subprocess.run(OMLXCTL, env=env, capture_output=True, text=True)
    if shell == "bash" and "version" in done.stderr:
        pytest.skip("bash is too old or not there")
    assert done.returncode == 0 and "_OMLXCTL_COMPLETE" in done.stdout
    asked = {**os.environ, "_OMLXCTL_COMPLETE": "zsh_complete", "COMP_WORDS": "omlxctl unp", "COMP_CWORD": "1"}
    assert "unpin" in subprocess.run(OMLXCTL, env=asked, capture_output=True, text=True).stdout


def test_the_diagnostics_archive_holds_no_key_no_prompt_and_no_answer(small: Server, tmp_path: Path) -> None:
    small.ctl("config", "set", "auth.api_key", "open-sesame")
    small.wait_for(lambda: small.get("/v1/models").status == 401, 5, "the key is asked for")
    key = {"Authorization": "Bearer open-sesame"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "my pin is 4711-xyzzy"}], "max_tokens": 4}
    assert small.post("/v1/chat/completions", body, headers=key).status == 200
    small.post("/v1/chat/completions", {**body, "temperature": "4711-xyzzy"}, headers=key)
    small.post("/v1/chat/completions", {**body, "model": "4711-xyzzy"}, headers=key)
    assert small.get("/v1/models?key=open-sesame").status == 200
    for wrong in ({"x-api-key": "open-sesame-too"}, {"Authorization": "Bearer open-sesame-too"}):
        assert small.post("/v1/chat/completions", body, headers=wrong).status == 401
    told = small.ctl("status", "--json").stdout + small.ctl("events").stdout + small.ctl("dump").stdout
    shown = [small.get(f"{path}?key=open-sesame").body.decode() for path in ("/api/status", "/v1/models/status", "/metrics")]
    logged = [file.read_text(errors="replace") for file in (small.home / "logs").iterdir()]
    assert all("sesame" not in text for text in (told, small.said(), *shown, *logged)), (
        "no key, right or wrong, is shown or logged"
    )
    (small.home / "logs" / "tiny.log").open("a").write("a library prints: my pin is 4711-xyzzy\n")
    (small.home / "logs" / "omlxd.log").open("a").write("2026-01-01T00:00:00 INFO omlxd: the key is open-sesame\n")
    file = tmp_path / "out.tar.gz"
    assert "state.json" in small.ctl("doctor", "--bundle", str(file)).stderr
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        texts = {member.name.split("/", 1)[1]: archive.extractfile(member).read().decode() for member in archive}
    assert {"doctor.json", "settings.json", "state.json", "events.json", "logs/omlxd.log", "logs/tiny.log"} <= set(texts)
    assert '"models"' in texts["state.json"] and "ready" in texts["events.json"]
    assert "worker" in texts["logs/omlxd.log"] and "the key is ***" in texts["logs/omlxd.log"]
    for name, text in texts.items():
        assert "open-sesame" not in text and "xyzzy" not in text, name


def test_doctor_finds_what_is_wrong_with_a_running_server(small: Server, tiny: Path) -> None:
    def findings() -> list[str]:
        told = json.loads(small.ctl("doctor", "--json", check=False).stdout)
        return [f"{f['name']} {f['level']} {f['text']}" for f in told]

    assert any(line.startswith("server ok running in") for line in findings())
    (small.home / "models" / "broken").mkdir()
    (small.home / "models" / "broken" / "config.json").write_text("{")
    (small.home / "run").chmod(0o755)
    (small.home / "settings.json").write_text(json.dumps({"memory": {"max_model_memory": "9999GB"}}))
    future = time.time() + 9000
    (small.home / "logs" / "old.log").touch()  # nobody writes to it meanwhile
    os.utime(small.home / "logs" / "old.log", (future, future))
    found = "\n".join(findings())
    for part in ("models warning", "broken", "run error", "chmod 700", "clock warning", "memory.max_model_memory is", "files "):
        assert part in found, part
    assert small.ctl("doctor", check=False).returncode == 1
    (small.home / "run").chmod(0o700)
    assert small.process is not None
    small.process.send_signal(signal.SIGSTOP)
    try:
        assert "does not answer" in "\n".join(findings())
    finally:
        small.process.send_signal(signal.SIGCONT)


def test_doctor_finds_a_low_limit_of_open_files_and_what_outlived_a_killed_server(small: Server) -> None:
    command = f"ulimit -n 200 && {OMLXCTL[0]} doctor"
    done = subprocess.run(["bash", "-c", command], env=small.env(), capture_output=True, text=True)
    assert "may open only 200 files" in done.stdout
    gateway = small.pid_of("gateway")
    os.kill(gateway, signal.SIGSTOP)
    small.kill()
    try:
        time.sleep(0.5)
        assert f"process {gateway} has outlived" in small.ctl("doctor", check=False).stdout
    finally:
        os.kill(gateway, signal.SIGKILL)
