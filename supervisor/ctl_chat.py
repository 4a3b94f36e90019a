"""`omlxctl chat` and `omlxctl run`: conversations in the terminal. Plain HTTP clients of the gateway, local or remote."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import msgspec

from supervisor.client import NotRunning
from supervisor.ctl_exit import CommandFailed, Exit, report
from supervisor.ctl_home import Home, pass_home
from supervisor.protocol import ServerStatus

if TYPE_CHECKING:
    from supervisor.ctl_http import Gateway, Message

_TOO_LONG = ("context_length_exceeded", "kv_too_large")
URL = click.option("--url", help="address of a server [default: the one of this home]")
KEY = click.option("--api-key", help="its key [default: auth.api_key, for the server of this home]")
SYSTEM = click.option("--system", help="system message that goes before the conversation")


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] PROMPT")
@SYSTEM
@URL
@KEY
@pass_home
def run(here: Home, words: tuple[str, ...], system: str | None, url: str | None, api_key: str | None) -> None:
    """Print one answer of MODEL to PROMPT, as it comes.

    Without MODEL it is the first one that is loaded, or the only one there is.
    """
    *named, prompt = words
    if len(named) > 1:
        raise click.UsageError("put the prompt in quotes: omlxctl run MODEL 'two or more words'")
    gateway = _gateway(here, url, api_key)
    model = named[0] if named else _default_model(here, gateway, url)
    conversation = Conversation(gateway, model, system)
    for piece in conversation.ask(prompt):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()


@click.command()
@click.argument("model", required=False)
@SYSTEM
@URL
@KEY
@pass_home
def chat(here: Home, model: str | None, system: str | None, url: str | None, api_key: str | None) -> None:
    """Hold a conversation with MODEL in the terminal.

    Ctrl-C ends an answer, Ctrl-D the conversation; /clear starts a new one. When it has outgrown the model's context its
    older half is left out. Without MODEL it is the first one that is loaded, or the only one there is.
    """
    gateway = _gateway(here, url, api_key)
    conversation = Conversation(gateway, model or _default_model(here, gateway, url), system)
    live = sys.stdin.isatty()
    if live:
        importlib.import_module("readline")  # gives input() its line editing

        click.secho(f"{conversation.model} at {gateway.url} (Ctrl-D ends)", dim=True)
    while (line := _next_line(live)) is not None:
        if line.strip() == "/clear":
            conversation.clear()
        elif line.strip():
            _answer(conversation, line)


def _next_line(live: bool) -> str | None:
    """What was typed, or None at the end. Ctrl-C drops the line, as in a shell: it may have come just after an answer's end."""
    try:
        return input("> " if live else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not live:
            raise
        click.secho("  (Ctrl-D ends)", dim=True)
        return ""


def _answer(conversation: "Conversation", line: str) -> None:
    """Prints one answer; what goes wrong ends the answer, not the conversation, unless nobody is there to go on."""
    try:
        for piece in conversation.ask(line):
            click.echo(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.secho(" [stopped]", dim=True, nl=False)
    except CommandFailed as problem:
        if not sys.stdin.isatty():
            raise
        report(problem)
    click.echo()


@dataclass
class Conversation:
    """What was said so far. A question that got no answer is not part of it."""

    gateway: "Gateway"
    model: str
    system: str | None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces; also one that was stopped is remembered as far as it came.

        A conversation that has outgrown the model's context goes on without its beginning, and says so. Nothing is forgotten
        for a question that is too long by itself, or gets no answer.
        """
        before = kept = self.messages
        while True:
            try:
                yield from self._answer_to(question, kept)
            except CommandFailed as problem:
                has_begun = self.messages is not before
                shorter = self._without_older_half(kept)
                if problem.code not in _TOO_LONG or has_begun or len(shorter) == len(kept):
                    raise
                kept = shorter
                click.secho("[the conversation is too long for the model; its older half is left out]", dim=True, err=True)
            else:
                return

    def _without_older_half(self, messages: "list[Message]") -> "list[Message]":
        """Not just the oldest exchange: every cut changes the prompt's beginning, which the server then has to prefill anew.

        The same where there is nothing to leave out.
        """
        first = 1 if self.system else 0
        exchanges = (len(messages) - first) // 2
        return messages[:first] + messages[first + 2 * ((exchanges + 1) // 2) :]

    def _answer_to(self, question: str, before: "list[Message]") -> Iterator[str]:
        messages: list[Message] = [*before, {"role": "user", "content": question}]
        answer = ""
        pieces = self.gateway.stream_chat(self.model, messages)
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            pieces.close()  # closes the connection, which ends the work in the server
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]


def _gateway(here: Home, url: str | None, api_key: str | None) -> "Gateway":
    from supervisor.ctl_http import Gateway

    if url:
        return Gateway(url, api_key)  # this home's own key is not for others
    return Gateway(_local_url(here), api_key or here.loaded.settings.auth.api_key)


def _local_url(here: Home) -> str:
    """The running server's own address; without one, where the settings would put it (it may belong to another home)."""
    try:
        with here.client() as client:
            status = msgspec.convert(client.call("status"), ServerStatus)
        return url_of(status.host, status.port)
    except NotRunning:
        server = here.loaded.settings.server
        if server.port == 0:
            raise
        return url_of(server.host, server.port)


def url_of(host: str, port: int) -> str:
    """Where to reach a server bound to `host`: one bound to every address is reached on loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # compared, not bound
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _default_model(here: Home, gateway: "Gateway", url: str | None) -> str:
    if not url and here.running:
        with here.client() as client:
            status = msgspec.convert(client.call("status"), ServerStatus)
        if ready := [model.id for model in status.models if model.state == "ready"]:
            return ready[0]
    known = gateway.models()
    if len(known) == 1:
        return known[0]
    if not known:
        from supervisor.catalog import GET_ONE_IN

        raise CommandFailed(f"the server has no models; get one in with: {GET_ONE_IN}", Exit.NOT_FOUND)
    raise CommandFailed(f"which model? The server has: {', '.join(known)}", Exit.USAGE)
