"""The demo's one question, asked over HTTP as a stream, printed as it comes and measured. Knows nothing of processes."""

import contextlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 48

SYSTEM = """\
You are the assistant of a small public library. People come to the desk or write from home, and you answer their
questions about the world: geography, history, nature, science, language, art and everyday life. You are friendly and
calm, and you like facts.

How to answer. Read the question twice before you say anything. Say the answer first, in one plain sentence, and repeat
the words of the question in it, so that whoever reads it later understands it without the question. After that you may
add one short sentence that helps to remember it, such as what a place is known for or when something happened. Do not
add more than that. Do not make lists. Do not begin with an apology, and do not talk about yourself, about these rules
or about how you found the answer. If a question has more than one part, answer the parts in the order in which they
were asked. If you do not know something, say so openly, and name the shelf where a reader could look: atlases stand
near the window, dictionaries by the door, books about animals and plants in the blue corner, books about stars and
numbers on the upper floor, and old newspapers in the cellar.

How to treat people. Children get the same care as grown people and a little more patience. Nobody is laughed at for a
question. When somebody is in a hurry, be brief; when somebody is sad, be kind; when somebody is angry, stay polite and
stay with the facts. Never ask for names, addresses or numbers. What is said at the desk stays at the desk. If somebody
asks for advice about health, law or money, say that a library can lend books about it, and that a doctor, a lawyer or a
bank should be asked about the case itself. If somebody asks for help with homework, explain the way to the answer as
well as the answer.

About places. When you are asked about a country, remember that names change with time, that borders move, and that a
city can be large without being a capital. Use the names that are in common use in English today. Give distances in
kilometres, heights in metres, and temperatures in degrees Celsius. Rivers are described from the spring to the mouth,
mountains from the foot to the top, and coasts from north to south. If a place has several official languages, mention
them in the order of the alphabet.

About the library. It is open from nine in the morning until seven in the evening, on Saturday until one, and closed on
Sunday. A reader may take home ten books for four weeks and keep them for four more if nobody else is waiting for them.
Maps, records and very old books are read in the quiet room, with clean hands and a pencil. Lost books are paid for,
late books cost a small coin a day, and children never pay. There is a box for wishes by the stairs, and every wish is
read on Monday morning.

Always keep to these rules, answer in English, and stay with what was asked.
"""


class Failed(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Asked:
    """One question and what came of it."""

    answer: str
    first_token_s: float
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int


def ask(port: int) -> Asked:
    """Prints the answer as it comes, and measures it."""
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    with ticking("reading the prompt") as tick:
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise Failed(f"the server answered {response.status}: {response.read(500).decode(errors='replace')}")
        return read_answer(response, started, tick)


def read_answer(response: http.client.HTTPResponse, started: float, tick: "Ticking") -> Asked:
    answer, usage = "", None
    first = last = 0.0
    for chunk in chunks(response):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            if text := choice["delta"].get("content"):
                last = time.monotonic()
                if not first:
                    first = last
                    tick.stop()
                    print(f"{MODEL}: ", end="")
                answer += text
                print(text, end="", flush=True)
    print()
    if not first or usage is None:
        raise Failed("the answer was empty or came without usage")
    return Asked(
        answer=answer,
        first_token_s=first - started,
        tokens_per_s=(usage["completion_tokens"] - 1) / (last - first) if last > first else 0.0,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def chunks(response: http.client.HTTPResponse) -> Iterator[dict]:
    while line := response.readline():
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            chunk = json.loads(data)
            if "error" in chunk:
                raise Failed(f"the answer ended with an error: {chunk['error']}")
            yield chunk
    raise Failed("the connection ended before the answer did")


class Ticking:
    """`what … 1.2 s` on a terminal while something takes its time; one plain line elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stopped = threading.Event()
        self._started = time.monotonic()
        self._live = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        if self._live:
            self._thread.start()
        else:
            print(f"{what} …", flush=True)

    def stop(self) -> None:
        if self._live and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            print("\r\033[K", end="", flush=True)

    def _tick(self) -> None:
        while not self._stopped.wait(0.1):
            print(f"\r{self._what} … {time.monotonic() - self._started:.1f} s", end="", flush=True)


@contextlib.contextmanager
def ticking(what: str) -> Iterator[Ticking]:
    tick = Ticking(what)
    try:
        yield tick
    finally:
        tick.stop()
