"""omlxctl serve, status, ps, reload, stop, logs: what is asked of the server and what a person reads."""

import importlib.metadata
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete

from supervisor import ctl
from supervisor.ctl_group import ELSEWHERE
from supervisor.logs import LogBook
from supervisor.protocol import SlotStatus
from supervisor.settings_load import Loaded
from tests.stands.patience import patient_s
from tests.supervisor.ctl_stand import STATUS, ScriptedSupervisor, Shell, plain_dict


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Loaded]:
    """Stands in for the daemon: what `omlxctl serve` would have started it with."""
    started: list[Loaded] = []

    def run(loaded: Loaded) -> int:
        started.append(loaded)
        return 0

    monkeypatch.setitem(sys.modules, "supervisor.daemon", SimpleNamespace(run=run))
    monkeypatch.setattr("supervisor.daemon", SimpleNamespace(run=run), raising=False)
    return started


def test_serve_hands_flags_and_models_to_the_daemon(shell: Shell, served: list[Loaded]) -> None:
    ran = shell("serve", "a", "b", "--port", "0", "--model-dir", "/x", "--model-dir", "/y", "--no-cache", "--model", "c")
    assert ran.status == 0
    settings = served[0].settings
    assert settings.server.port == 0
    assert settings.model.model_dirs == ("/x", "/y")
    assert settings.model.preload == ("c", "a", "b")
    assert not settings.cache.enabled
    assert settings.server.host == "127.0.0.1"
    assert served[0].sources["server.host"] == "default"


def test_switches_can_be_turned_off_by_flag(shell: Shell, served: list[Loaded]) -> None:
    shell.patch.setenv("OMLX_HOT_CACHE_ONLY", "true")
    assert shell("serve", "--no-hot-cache-only").status == 0
    assert not served[0].settings.cache.hot_cache_only


def test_omlxd_is_omlxctl_serve(shell: Shell, served: list[Loaded], tmp_path: Path) -> None:
    assert shell("--home", str(tmp_path), "--log-level", "debug", as_omlxd=True).status == 0
    assert served[0].home == tmp_path
    assert served[0].settings.server.log_level == "debug"


def test_serve_lists_every_wrong_setting_with_its_key_path(shell: Shell, served: list[Loaded], home: Path) -> None:
    (home / "settings.json").write_text('{"sampling": {"top_p": 7}, "servr": {}}')
    ran = shell("serve", "--port", "99999")
    assert ran.status == 2
    assert "sampling.top_p" in ran.err and "servr" in ran.err and "server.port (flag --port)" in ran.err
    assert not served


def test_status_without_a_server_says_how_to_start_one(shell: Shell) -> None:
    ran = shell("status")
    assert ran.status == 3
    assert "omlxd is not running" in ran.err and "omlxctl serve" in ran.err
    assert ran.out == ""


def test_a_broken_settings_file_does_not_hide_the_running_server(shell: Shell, server: ScriptedSupervisor, home: Path) -> None:
    (home / "settings.json").write_text("{")
    assert shell("status").status == 0


def test_status_shows_address_memory_models_and_warnings(shell: Shell, server: ScriptedSupervisor) -> None:
    ran = shell("status")
    assert ran.status == 0
    assert "http://127.0.0.1:8123" in ran.out
    assert "2.0 GiB of 16.0 GiB" in ran.out
    assert "2 known, 1 loaded: tiny" in ran.out
    assert "ready (pid 42), restarted 3 times" in ran.out
    assert "the fan is loud" in ran.err


def test_a_server_without_models_says_how_to_get_one_in(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("status", plain_dict(msgspec.structs.replace(STATUS, models=[])))
    assert "none yet; get one in with: omlxctl models add DIR" in shell("status").out


def test_status_json_is_everything_the_server_said(shell: Shell, server: ScriptedSupervisor) -> None:
    assert json.loads(shell("status", "--json").out) == plain_dict(STATUS)


def test_ps_lists_loaded_and_failing_models_but_not_idle_ones(shell: Shell, server: ScriptedSupervisor) -> None:
    failing = SlotStatus(id="bad", path="/m/bad", state="failed", last_error="it broke\na stack")
    loading = SlotStatus(id="big", path="/m/big", state="loading", pid=9, stage="weights", done=1, total=4)
    server.answers("status", plain_dict(msgspec.structs.replace(STATUS, models=[*STATUS.models, failing, loading])))
    ran = shell("ps")
    tiny = next(line for line in ran.out.splitlines() if line.startswith("tiny"))
    assert ran.out.split()[:5] == ["NAME", "STATE", "PID", "GIVEN", "MEASURED"] and "2.0 GiB  1.5 GiB" in tiny
    assert "loading weights 25%" in ran.out
    assert "other" not in ran.out
    assert "it broke" in ran.err and "omlxctl logs bad" in ran.err
    listed = json.loads(shell("ps", "--json").out)
    assert [model["id"] for model in listed["models"]] == ["tiny", "bad", "big"]
    assert listed["children"][0]["name"] == "gateway"


def test_reload_says_what_changed_and_what_needs_a_restart(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("reload", {"changed": ["sampling.top_k", "server.port"], "restart": ["server.port"]})
    ran = shell("reload")
    assert "sampling.top_k: changed" in ran.out
    assert "server.port: takes effect after: omlxctl restart" in ran.out
    server.answers("reload", {"changed": [], "restart": []})
    assert "nothing changed" in shell("reload").out


def test_reload_of_a_bad_file_fails_with_all_problems(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("reload", ("settings_invalid", "server.port: no\nsampling.top_p: no"))
    ran = shell("reload")
    assert ran.status == 2
    assert "server.port: no\nsampling.top_p: no" in ran.err


def test_stop_returns_when_the_server_has_gone(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers_and_ends("stop", {}, after_s=0.4)
    started = time.monotonic()
    ran = shell("stop")
    assert ran.status == 0 and ran.out.startswith("omlxd (pid ") and "has stopped" in ran.out
    assert 0.3 < time.monotonic() - started < patient_s(3)


def test_stop_fails_when_the_server_stays(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("stop", {})
    shell.patch.setattr("supervisor.ctl_server.STOP_S", 0.2)
    ran = shell("stop")
    assert ran.status == 1
    assert "kill -9" in ran.err


def test_logs_prints_the_lines_of_one_process(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("logs", {"lines": ["one", "two"]}, {})
    ran = shell("logs", "gateway", "-n", "2")
    assert ran.out == "one\ntwo\n"
    assert server.calls == [("logs", {"name": "gateway", "lines": 2, "follow": False})]


def test_logs_of_nobody_are_not_found(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("logs", ("model_not_found", "nope is neither a model nor a process"))
    assert shell("logs", "nope").status == 4


def test_followed_logs_end_with_the_server(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers_and_ends("logs", {"lines": ["one"]}, {"lines": ["two"]}, None, after_s=1.0)
    ran = shell("logs", "omlxd", "-f")
    assert (ran.status, ran.out) == (3, "one\ntwo\n")


def test_without_a_server_logs_come_from_the_file(shell: Shell, home: Path) -> None:
    (home / "logs").mkdir()
    book = LogBook("org/model", home / "logs")
    for number in range(5):
        book.say(f"line {number}")
    book.close()
    ran = shell("logs", "org/model", "-n", "2")
    assert [line.split(" ", 1)[1] for line in ran.out.splitlines()] == ["line 3", "line 4"]
    assert shell("logs", "nothing").status == 4


def test_every_exit_status_is_in_the_manual(shell: Shell) -> None:
    manual = shell("--help").out
    for status in ("0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "130 "):
        assert f"\n    {status}" in manual


def test_the_version_is_that_of_the_installation(shell: Shell) -> None:
    assert shell("--version").out == f"omlxd {importlib.metadata.version('omlxd')}\n"


def test_an_unknown_command_is_a_usage_error(shell: Shell) -> None:
    assert shell("frobnicate").status == 2


def test_what_other_tools_call_it_is_answered_with_our_word_for_it(shell: Shell) -> None:
    known = {" ".join(words) for words, _ in commands(ctl.omlxctl)}
    for theirs, ours in ELSEWHERE.items():
        ran = shell(theirs, "anything")
        assert ran.status == 2 and f"There is no command {theirs}; it is: omlxctl {ours}" in ran.err
        named = (piece.removeprefix("omlxctl ") for piece in re.findall(r"omlxctl [a-z]+(?: [a-z]+)?", f"omlxctl {ours}"))
        assert set(named) <= known, theirs


def test_completion_after_a_word_of_other_tools_does_not_fail() -> None:
    assert ShellComplete(ctl.omlxctl, {}, "omlxctl", "_OMLXCTL_COMPLETE").get_completions(["show"], "mod")


def test_the_list_of_commands_holds_all_of_them_and_cuts_no_sentence_short(shell: Shell) -> None:
    shell.patch.setenv("COLUMNS", "80")
    for words in ((), ("models",), ("cache",), ("config",), ("service",)):
        listed = shell(*words, "--help").out
        assert "..." not in listed.replace("[ARGS]...", ""), words
    top = shell("--help").out
    assert all(f"\n  {name} " in top for name in ctl.omlxctl.commands)


@pytest.mark.parametrize(
    ("code", "status"),
    [("model_not_found", 4), ("model_too_large", 5), ("busy", 5), ("model_failed", 1), ("bad_request", 2), ("new", 1)],
)
def test_the_servers_codes_become_exit_statuses(shell: Shell, server: ScriptedSupervisor, code: str, status: int) -> None:
    server.answers("load", (code, "because"))
    ran = shell("load", "tiny")
    assert (ran.status, ran.err.strip().splitlines()[-1]) == (status, "Error: because")


def test_ctrl_c_ends_with_130_and_no_stack(home: Path, server: ScriptedSupervisor) -> None:
    server.answers("load", {"stage": "weights"}, None)
    command = [sys.executable, "-P", "-c", "import supervisor.ctl; supervisor.ctl.main()", "load", "tiny"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "weights" in process.stderr.readline()
    process.send_signal(2)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr.read()


def test_status_takes_less_than_0_3_s_of_a_core(home: Path, server: ScriptedSupervisor) -> None:
    """In processor time, at its cheapest: what busy cores add to it is not ours."""
    command = [sys.executable, "-P", "-c", "import supervisor.ctl; supervisor.ctl.main()", "status"]
    cpu_s = least_cpu_s(command)
    # On a slow machine, or beside much else: so much more than Python with the libraries that it cannot do without.
    assert cpu_s < 0.3 or cpu_s < 4 * least_cpu_s([sys.executable, "-P", "-c", "import click, msgspec, zmq"]), cpu_s


def least_cpu_s(command: Sequence[str]) -> float:
    """Of five times."""
    cpu_s: list[float] = []
    for _ in range(5):
        used = children_cpu_s()
        subprocess.run(command, check=True, capture_output=True)
        cpu_s.append(children_cpu_s() - used)
    return min(cpu_s)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_status_imports_nothing_slow(home: Path, server: ScriptedSupervisor) -> None:
    code = "import sys, supervisor.ctl as c\ntry: c.main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-P", "-c", code, "status"], capture_output=True, text=True, check=True)
    for name in ("mlx", "aiohttp", "psutil", "numpy", "http.client", "supervisor.daemon", "supervisor.catalog"):
        assert f"'{name}'" not in done.stderr


CONVERSATIONS = {("serve",), ("run",), ("chat",)}
"""What these print is not an answer about the server."""


def commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield (*words, name), command


def test_every_command_can_answer_in_json_and_has_a_manual() -> None:
    found = dict(commands(ctl.omlxctl))
    assert {words for words, command in found.items() if not command.help} == set()
    without = {words for words, command in found.items() if not any("--json" in option.opts for option in command.params)}
    assert without == CONVERSATIONS


def test_every_command_of_the_manual_is_there() -> None:
    found = {" ".join(words) for words, _ in commands(ctl.omlxctl)}
    operators = "serve status ps models load unload pin unpin reset logs events reload restart stop dump doctor apply"
    assert set(operators.split()) <= found
    assert {f"config {verb}" for verb in ("show", "get", "set", "import")} <= found
    assert {f"service {verb}" for verb in ("install", "uninstall", "start", "stop", "status")} <= found


@pytest.mark.parametrize(
    ("words", "verb", "result"),
    [
        (("unload", "tiny"), "unload", {"model": "tiny", "pid": None}),
        (("pin", "tiny"), "pin", {"model": "tiny"}),
        (("unpin", "tiny"), "unpin", {"model": "tiny"}),
        (("reset", "tiny"), "reset", {"model": "tiny"}),
        (("load", "tiny", "--no-wait"), "load", {"model": "tiny", "state": "queued"}),
        (("dump",), "dump", {"slots": []}),
        (("cache", "explain", "r"), "cache_explain", {"lines": ["a"]}),
        (("apply", "tiny:p"), "apply", {"model": "tiny", "profile": "p"}),
    ],
)
def test_the_servers_answer_is_printed_as_it_is(
    shell: Shell, server: ScriptedSupervisor, words: tuple[str, ...], verb: str, result: dict[str, object]
) -> None:
    server.answers(verb, result)
    assert json.loads(shell(*words, "--json").out) == result


def test_logs_in_json_are_one_object_a_line(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("logs", {"lines": ["a", "b"]}, {})
    assert [json.loads(line) for line in shell("logs", "tiny", "--json").out.splitlines()] == [
        {"name": "tiny", "line": "a"},
        {"name": "tiny", "line": "b"},
    ]


def test_nothing_is_coloured_that_does_not_go_to_a_terminal(shell: Shell, server: ScriptedSupervisor) -> None:
    server.answers("load", ("model_not_found", "there is no model nobody"))
    for words in (("status",), ("ps",), ("doctor",), ("--help",), ("load", "nobody")):
        ran = shell(*words)
        assert "\033" not in ran.out + ran.err, words
