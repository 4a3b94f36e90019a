"""What makes the prefix cache hit in practice, from outside: volatile headers, salts, switches, why a miss was one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stands.server import Answer, Server, running

BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={};"
RULES = "You are a helpful assistant. Answer the question with one word. " * 12


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with running({"tiny": tiny}) as server:
        server.ctl("load", "tiny")
        yield server


def ask(server: Server, *messages: tuple[str, object], model: str = "tiny", **fields: object) -> Answer:
    body = {"model": model, "messages": [{"role": role, "content": content} for role, content in messages]}
    answer = server.post("/v1/chat/completions", body | {"temperature": 0, "max_tokens": 4, **fields})
    assert answer.status == 200, answer
    return answer


def prompt_tokens(answer: Answer) -> int:
    return answer.json()["usage"]["prompt_tokens"]


def blocks(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def test_an_agents_billing_header_does_not_cost_the_prefix(server: Server) -> None:
    system = [*blocks(BILLING.format("fa690")), *blocks(RULES)]
    first = ask(server, ("system", system), ("user", "hello"))
    plain = ask(server, ("system", RULES), ("user", "hello"))
    changed = ask(server, ("system", f"{BILLING.format('0c1d2')}\n{RULES}"), ("user", "hello"))
    assert prompt_tokens(first) == prompt_tokens(plain) == prompt_tokens(changed)
    assert [a.cached_tokens for a in (first, plain, changed)] == [0, prompt_tokens(first) - 1, prompt_tokens(first) - 1]


def test_the_same_line_from_a_user_is_the_conversations_own(server: Server) -> None:
    one = ask(server, ("user", f"{BILLING.format('aaaaa')}\n{RULES}"))
    other = ask(server, ("user", f"{BILLING.format('bbbbb')}\n{RULES}"))
    assert prompt_tokens(one) > prompt_tokens(ask(server, ("user", RULES)))
    assert other.cached_tokens < 64


def test_an_empty_list_leaves_headers_where_they_are(tiny: Path) -> None:
    with running({"tiny": tiny}, {"cache": {"volatile_headers": []}}) as server:
        with_header = ask(server, ("system", f"{BILLING.format('fa690')}\n{RULES}"), ("user", "hello"))
        without = ask(server, ("system", RULES), ("user", "hello"))
    assert prompt_tokens(with_header) > prompt_tokens(without)


def test_a_header_does_not_count_against_the_context_of_a_model_that_is_not_loaded(tiny: Path) -> None:
    """The text worker counts what the model's own worker will see: a header of 2,000 letters would not fit 256 tokens."""
    with running({"tiny": tiny}, {"models": {"tiny": {"context": 256}}}) as server:
        ask(server, ("system", f"{BILLING.format('f' * 2000)}\nBe brief."), ("user", "hello"))


def test_requests_with_different_salts_share_nothing(server: Server) -> None:
    said = ("user", f"Between us: {RULES}")
    alice, bob, again = (ask(server, said, cache_salt=salt) for salt in ("alice", "bob", "alice"))
    assert (alice.cached_tokens, bob.cached_tokens, again.cached_tokens) == (0, 0, prompt_tokens(alice) - 1)
    assert ask(server, said).cached_tokens == 0


def test_the_cache_of_one_model_can_be_turned_off_or_kept_in_ram(tiny: Path) -> None:
    settings = {
        "models": {"off": {"cache": "off"}, "ram": {"cache": "ram", "hot_cache_max_size": "32MB"}, "ssd": {"cache": "ssd"}}
    }
    with running({"off": tiny, "ram": tiny, "ssd": tiny}, settings) as server:
        answers = {name: [ask(server, ("user", RULES), model=name) for _ in range(2)] for name in ("off", "ram", "ssd")}
        repeat = {name: second.cached_tokens for name, (_, second) in answers.items()}
        whole = prompt_tokens(answers["ram"][0]) - 1
        assert repeat == {"off": 0, "ram": whole, "ssd": whole // 64 * 64}
        assert "off: models.ID.cache" in server.ctl("models", "show", "off").stdout
        assert "RAM up to 32.0 MiB\n" in server.ctl("models", "show", "ram").stdout
        states = {name: server.model(name)["cache"] for name in ("off", "ram", "ssd")}
        assert states == {"off": "off: models.ID.cache is off", "ram": "RAM up to 32.0 MiB", "ssd": "disk"}
        assert list((server.home / "cache").rglob("*.safetensors")), "ssd wrote nothing"
        server.ctl("unload", "ram")
        server.ctl("unload", "ssd")
        again = {name: ask(server, ("user", RULES), model=name).cached_tokens for name in ("ram", "ssd")}
        assert again == {"ram": 0, "ssd": whole // 64 * 64}


def test_a_miss_is_explained_by_its_request_id(server: Server) -> None:
    notes = [f"Note {n}: {RULES}" for n in ("one", "two")]
    ask(server, ("system", f"{notes[0]}\nToday is Monday. {RULES}"), ("user", "hello"))
    missed = ask(server, ("system", f"{notes[0]}\nToday is Sunday. {RULES}"), ("user", "hello"))
    said = server.ctl("cache", "explain", missed.headers["x-request-id"]).stdout
    assert f"{missed.cached_tokens} from the cache" in said
    assert "Monday" in said and "Sunday" in said and "agree again" in said

    def lines() -> list[str]:
        return [line for line in server.ctl("logs", "tiny").stdout.splitlines() if missed.headers["x-request-id"] in line]

    server.wait_for(lines, 5, "the miss is logged")
    logged = lines()[0]
    assert "cache miss: " in logged and "at token" in logged and "Sunday" not in logged, "no text of prompts belongs into a log"


def test_a_request_that_nobody_remembers_is_said_so(server: Server) -> None:
    done = server.ctl("cache", "explain", "req_unheard_of", check=False)
    assert done.returncode != 0 and "req_unheard_of" in done.stderr


@pytest.mark.parametrize("dtype", ["native", "int8"])
def test_a_model_that_is_loaded_again_reads_its_last_conversations_back_into_ram(tiny: Path, dtype: str) -> None:
    with running({"tiny": tiny}, {"cache": {"ssd_dtype": dtype}}) as server:
        first = ask(server, ("user", RULES))
        server.ctl("unload", "tiny")
        server.ctl("load", "tiny")
        server.wait_for(lambda: (server.model("tiny")["beat"] or {}).get("hot_bytes"), 10, "blocks are back in RAM")
        assert ask(server, ("user", RULES)).cached_tokens == (prompt_tokens(first) - 1) // 64 * 64
        sizes = {file.stat().st_size for file in (server.home / "cache").rglob("*.safetensors")}
        native_bytes = 512 * 64
        assert all((size > native_bytes) == (dtype == "native") for size in sizes), sizes
        assert server.model("tiny")["cache"].endswith("disk" if dtype == "native" else "disk as int8")


def test_six_first_requests_at_once_share_their_prefix(server: Server) -> None:
    system = f"Six of us: {RULES * 4}"
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: ask(server, ("system", system), ("user", f"I am {n}.")), range(6)))
    computed = sum(prompt_tokens(answer) - answer.cached_tokens for answer in answers)
    assert computed <= 1.4 * prompt_tokens(answers[0]) + 6 * 64
