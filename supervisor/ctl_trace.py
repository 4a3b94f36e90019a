"""`omlxctl trace`: where a request's time went, step by step."""

import time
from typing import cast

import click
import msgspec

from supervisor import ctl_terminal as terminal
from supervisor.ctl_home import Home, pass_home


class Step(msgspec.Struct, frozen=True):
    step: str
    detail: str
    at_s: float
    took_s: float


class Answer(msgspec.Struct, frozen=True):
    rid: str
    outcome: str | None
    attempts: int
    parks: int
    prompt_tokens: int
    completion_tokens: int
    cached_ram_tokens: int
    cached_ssd_tokens: int
    steps: list[Step]


class Request(msgspec.Struct, frozen=True):
    """As gateway/records.py tells it."""

    id: str
    client_id: str | None
    what: str
    model: str
    status: int | None
    error: str | None
    received: float
    is_over: bool
    timings: dict[str, float | None]
    answers: list[Answer]


@click.command()
@click.argument("request_id", metavar="RID")
@click.option("--json", "as_json", is_flag=True, help="everything, as JSON")
@pass_home
def trace(here: Home, request_id: str, as_json: bool) -> None:
    """Say where the time of a request went, also while it runs.

    RID is the x-request-id of the answer, the id in its body, or the x-request-id that the client sent. The last 1000 requests
    are known, as long as the gateway runs; the exit status is 4 for any other.
    """
    with here.client() as client:
        result = client.call("trace", {"rid": request_id})
    if as_json:
        return terminal.print_json(result)
    for number, request in enumerate(msgspec.convert(result["requests"], list[Request])):
        if number:
            click.echo()
        _show(request)
    return None


def _show(request: Request) -> None:
    total_s = cast("float", request.timings["total_s"])
    called = f"{request.id} ({request.client_id})" if request.client_id else request.id
    state = f"took {seconds(total_s)}" if request.is_over else f"running for {seconds(total_s)}"
    status = f"{request.status or 'no status yet'}" + (f" {request.error}" if request.error else "")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.received))
    terminal.print_facts({"request": called, "asked": f"{request.what} at {at}", "model": request.model or "-"})
    terminal.print_facts({"status ": status, "time": state})
    for answer in request.answers:
        click.echo()
        _show_answer(answer, total_s)


def _show_answer(answer: Answer, total_s: float) -> None:
    cached = f"{answer.cached_ram_tokens} from RAM, {answer.cached_ssd_tokens} from SSD"
    tries = f", {answer.attempts} attempts" if answer.attempts > 1 else ""
    tries += f", put aside {answer.parks} times" if answer.parks else ""
    click.echo(f"{answer.rid}: {answer.outcome or 'running'}{tries}")
    click.echo(f"prompt {answer.prompt_tokens} tokens ({cached}), answer {answer.completion_tokens} tokens")
    rows = [[step.step, step.detail, seconds(step.at_s), seconds(step.took_s), _share(step, total_s)] for step in answer.steps]
    terminal.print_table(["STEP", "", "AT", "TOOK", "SHARE"], rows)


def _share(step: Step, total_s: float) -> str:
    return f"{step.took_s / total_s:.0%}" if total_s > 0 else "-"


def seconds(value: float) -> str:
    """`12 ms`, `3.21 s`."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
