"""omlxctl run and chat against a gateway that follows a script."""

import io
import json
from collections.abc import Generator
from pathlib import Path

import pytest

from supervisor.ctl_chat import url_of
from supervisor.ctl_exit import CommandFailed, Exit
from tests.supervisor.ctl_stand import STATUS, ScriptedGateway, ScriptedSupervisor, Shell, chunk, plain_dict

ANSWER = (chunk("Par"), chunk("is"), json.dumps({"choices": []}), "[DONE]")


def test_run_prints_the_answer_as_it_came(shell: Shell) -> None:
    with ScriptedGateway(ANSWER) as gateway:
        ran = shell("run", "tiny", "Capital?", "--url", gateway.url + "/v1", "--system", "Be brief.", "--api-key", "k")
    assert (ran.status, ran.out) == (0, "Paris\n")
    path, key, body = gateway.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]
    assert body == {"model": "tiny", "messages": messages, "stream": True}


def test_run_without_a_model_takes_the_only_one(shell: Shell) -> None:
    with ScriptedGateway(ANSWER) as gateway:
        assert shell("run", "Capital?", "--url", gateway.url).out == "Paris\n"
        assert gateway.seen[0][2]["model"] == "tiny"


def test_run_without_a_model_asks_which_when_there_are_several(shell: Shell) -> None:
    with ScriptedGateway(ANSWER, models=("a", "b")) as gateway:
        ran = shell("run", "Capital?", "--url", gateway.url)
    assert (ran.status, "a, b" in ran.err) == (2, True)


def test_the_running_server_gives_address_and_loaded_model(shell: Shell, server: ScriptedSupervisor, home: Path) -> None:
    (home / "settings.json").write_text('{"auth": {"api_key": "local-key"}}')
    with ScriptedGateway(ANSWER, models=("a", "b", "tiny")) as gateway:
        server.answers("status", plain_dict(STATUS) | {"port": gateway.port})
        assert shell("run", "Capital?").out == "Paris\n"
    _, key, body = gateway.seen[0]
    assert (key, body["model"]) == ("Bearer local-key", "tiny")


def test_the_local_key_is_not_sent_to_another_server(shell: Shell, home: Path) -> None:
    (home / "settings.json").write_text('{"auth": {"api_key": "local-key"}}')
    with ScriptedGateway(ANSWER) as gateway:
        shell("run", "tiny", "hi", "--url", gateway.url)
    assert gateway.seen[0][1] is None


def test_an_answer_that_is_cut_off_is_a_failure(shell: Shell) -> None:
    with ScriptedGateway((chunk("Par"),)) as gateway:
        ran = shell("run", "tiny", "hi", "--url", gateway.url)
    assert (ran.status, ran.out.startswith("Par")) == (1, True)
    with ScriptedGateway((chunk("Par"),), cut=True) as gateway:
        assert shell("run", "tiny", "hi", "--url", gateway.url).status == 1


def test_an_error_event_is_shown_in_the_servers_words(shell: Shell) -> None:
    event = json.dumps({"error": {"message": "the worker was lost", "code": "worker_lost", "type": "server_error"}})
    with ScriptedGateway((chunk("Par"), event)) as gateway:
        ran = shell("run", "tiny", "hi", "--url", gateway.url)
    assert (ran.status, "the worker was lost" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("http", "code", "status"),
    [(404, "model_not_found", 4), (429, "queue_full", 5), (400, "context_length_exceeded", 5), (401, None, 5), (503, "x", 1)],
)
def test_http_errors_become_exit_statuses(shell: Shell, http: int, code: str | None, status: int) -> None:
    body = json.dumps({"error": {"message": "because", "type": "t", "code": code}})
    with ScriptedGateway((body,), status=http) as gateway:
        ran = shell("run", "tiny", "hi", "--url", gateway.url)
    assert (ran.status, "because" in ran.err) == (status, True)


def test_a_server_of_another_kind_is_quoted(shell: Shell) -> None:
    with ScriptedGateway(("<html>hello</html>",), status=502) as gateway:
        ran = shell("run", "tiny", "hi", "--url", gateway.url)
    assert (ran.status, "502: <html>" in ran.err) == (1, True)


def test_no_server_at_all_is_exit_3(shell: Shell) -> None:
    with ScriptedGateway() as gateway:
        url = gateway.url
    ran = shell("run", "tiny", "hi", "--url", url)
    assert (ran.status, "omlxctl serve" in ran.err) == (3, True)
    assert shell("run", "tiny", "hi", "--url", "ftp://x").status == 2


def test_words_without_quotes_are_a_usage_error(shell: Shell) -> None:
    assert shell("run", "tiny", "two", "words").status == 2


def test_chat_remembers_the_conversation_until_it_is_cleared(shell: Shell) -> None:
    shell.patch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/clear\nthree\n"))
    with ScriptedGateway(ANSWER) as gateway:
        ran = shell("chat", "tiny", "--url", gateway.url, "--system", "S")
    assert (ran.status, ran.out) == (0, "Paris\nParis\nParis\n")
    asked = [[m["content"] for m in body["messages"]] for _, _, body in gateway.seen]  # pyright: ignore
    assert asked == [["S", "one"], ["S", "one", "Paris", "two"], ["S", "three"]]


def test_a_conversation_too_long_for_the_model_goes_on_without_its_older_half(shell: Shell) -> None:
    asked: list[list[str]] = []

    def answer(_gateway: object, _model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        asked.append([message["content"] for message in messages])
        if len(messages) > 5:
            raise CommandFailed("too long", Exit.REFUSED, code="context_length_exceeded")
        yield messages[-1]["content"].upper()

    shell.patch.setattr("supervisor.ctl_http.Gateway.stream_chat", answer)
    shell.patch.setattr("sys.stdin", io.StringIO("a\nb\nc\nd\ne\n"))
    ran = shell("chat", "tiny", "--url", "http://127.0.0.1:1", "--system", "S")
    assert (ran.status, ran.out) == (0, "A\nB\nC\nD\nE\n")
    assert ran.err.count("its older half is left out") == 3
    assert asked[2:] == [
        ["S", "a", "A", "b", "B", "c"],
        ["S", "b", "B", "c"],
        ["S", "b", "B", "c", "C", "d"],
        ["S", "c", "C", "d"],
        ["S", "c", "C", "d", "D", "e"],
        ["S", "d", "D", "e"],
    ]


def test_a_question_that_is_too_long_by_itself_fails(shell: Shell) -> None:
    body = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})
    with ScriptedGateway((body,), status=400) as gateway:
        shell.patch.setattr("sys.stdin", io.StringIO("one\n"))
        ran = shell("chat", "tiny", "--url", gateway.url, "--system", "S")
        assert (ran.status, len(gateway.seen)) == (5, 1)
        assert "too long" in ran.err and "left out" not in ran.err


def test_a_question_that_is_too_long_by_itself_costs_nothing_of_the_conversation(shell: Shell) -> None:
    asked: list[list[str]] = []

    def answer(_gateway: object, _model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        asked.append([message["content"] for message in messages])
        if "long" in asked[-1]:
            raise CommandFailed("too long", Exit.REFUSED, code="context_length_exceeded")
        yield messages[-1]["content"].upper()

    shell.patch.setattr("supervisor.ctl_http.Gateway.stream_chat", answer)
    shell.patch.setattr("sys.stdin", Terminal("a\nb\nlong\nc\n"))
    ran = shell("chat", "tiny", "--url", "http://127.0.0.1:1", "--system", "S")
    assert ran.status == 0 and "too long" in ran.err
    assert asked[2:-1] == [["S", "a", "A", "b", "B", "long"], ["S", "b", "B", "long"], ["S", "long"]]
    assert asked[-1] == ["S", "a", "A", "b", "B", "c"]


class Terminal(io.StringIO):
    """Typed lines, from what calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_an_answer_but_not_the_conversation(shell: Shell) -> None:
    asked: list[list[str]] = []

    def answer(_gateway: object, _model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        asked.append([message["content"] for message in messages])
        yield "Par"
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield "is"

    shell.patch.setattr("supervisor.ctl_http.Gateway.stream_chat", answer)
    shell.patch.setattr("sys.stdin", Terminal("one\ntwo\n"))
    ran = shell("chat", "tiny", "--url", "http://127.0.0.1:1")
    assert ran.status == 0
    assert "Par [stopped]" in ran.out and "Paris" in ran.out
    assert asked == [["one"], ["one", "Par", "two"]]


def test_an_error_ends_a_typed_answer_but_a_piped_conversation(shell: Shell) -> None:
    body = json.dumps({"error": {"message": "busy", "code": "queue_full"}})
    with ScriptedGateway((body,), status=429) as gateway:
        shell.patch.setattr("sys.stdin", Terminal("one\ntwo\n"))
        assert shell("chat", "tiny", "--url", gateway.url).status == 0
        assert len(gateway.seen) == 2
        shell.patch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
        assert shell("chat", "tiny", "--url", gateway.url).status == 5
        assert len(gateway.seen) == 3


def test_a_server_bound_to_every_address_is_reached_on_loopback() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("10.1.1.1", 80) == "http://10.1.1.1:80"
