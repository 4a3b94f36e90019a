"""The block store under a real server: what omlxctl says and does about it, its cap, and what happens when it goes away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.stands.server import Server, home_with, running

MIB = 1 << 20
WORDS = "hello how are you today I am fine thank you very much "


def prompt(number: int, blocks: int = 4) -> str:
    """At least so many blocks of 64 tokens, different from the first token on."""
    return f"{number} {number} {number} " + WORDS * (5 * blocks)


def ask(server: Server, number: int, blocks: int = 4) -> str:
    answer = server.chat("tiny", prompt(number, blocks), max_tokens=4)
    assert answer.status == 200, answer
    return answer.text


def blocks_in(root: Path) -> list[Path]:
    return list(root.rglob("*.safetensors"))


def used_bytes(root: Path) -> int:
    """As du counts, but only what two looks both find, which was there between them: a single one takes a while and can add up
    a file and what was written after that was deleted.
    """
    first, second = sizes(root), sizes(root)
    return sum(min(size, second[found]) for found, size in first.items() if found in second)


def sizes(root: Path) -> dict[tuple[str, int], int]:
    """On the disk, by path and inode; what vanishes meanwhile is not there."""
    found: dict[tuple[str, int], int] = {}
    for directory, _, names in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            try:
                stat = os.lstat(path)
            except FileNotFoundError:
                continue
            found[path, stat.st_ino] = stat.st_blocks * 512
    return found


def cache_stats(server: Server) -> dict[str, object]:
    return json.loads(server.ctl("cache", "stats", "--json").stdout)


def worker(server: Server) -> dict[str, Any]:
    [found] = cache_stats(server)["server"]["workers"]
    return found


def is_settled(server: Server) -> bool:
    """All blocks that there are were written by the worker that there is, which has said so."""
    own = worker(server)
    counters = own["counters"]
    written = counters.get("blocks_written") == len(blocks_in(server.home / "cache"))
    return written and own["credit_bytes"] == counters["credit_bytes"]


@pytest.fixture(scope="module")
def cached(tiny: Path) -> Iterator[Server]:
    with running({"tiny": tiny}) as server:
        for number in range(3):
            ask(server, number)
        server.wait_for(lambda: len(blocks_in(server.home / "cache")) >= 12, 10, "the blocks are on disk")
        yield server


def test_stats_join_what_is_on_disk_with_what_the_worker_counts(cached: Server) -> None:
    ask(cached, 0)
    cached.wait_for(lambda: worker(cached)["counters"].get("hot_tokens", 0) > 100, 10, "the hit is counted")
    cached.wait_for(lambda: is_settled(cached), 10, "all that was written is counted")
    shown = cache_stats(cached)
    [namespace] = shown["namespaces"]
    assert namespace["model"] == "tiny" and namespace["blocks"] >= 12 and namespace["block_tokens"] == 64
    [own] = shown["server"]["workers"]
    assert own["namespace"] == namespace["name"]
    assert own["counters"]["blocks_written"] == namespace["blocks"]
    assert own["written_bytes"] > 0 and own["credit_bytes"] > 0
    documented = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    assert [key for key in own["counters"] if f"`{key}`" not in documented] == []
    text = cached.ctl("cache", "stats").stdout
    assert "tiny" in text and "from RAM" in text and "credit" in text


def test_what_is_written_while_the_model_idles_is_reported_too(cached: Server) -> None:
    """Else its credit would stay charged until somebody asks again."""
    ask(cached, 77, blocks=8)
    cached.wait_for(lambda: is_settled(cached), 5, "all that was written is settled")


def test_verify_reads_all_and_names_what_is_damaged(cached: Server) -> None:
    done = cached.ctl("cache", "verify")
    assert "are sound" in done.stdout and "reading" in done.stderr
    victim = blocks_in(cached.home / "cache")[0]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = cached.ctl("cache", "verify", check=False)
    assert done.returncode == 1 and f"{victim}: checksum" in done.stdout
    [report] = json.loads(cached.ctl("cache", "verify", "--json", check=False).stdout)["namespaces"]
    assert report["bad"] == [{"path": str(victim), "reason": "checksum"}]
    victim.write_bytes(whole)


def test_gc_through_the_janitor_reports_what_it_would_and_did_delete(cached: Server) -> None:
    stray = cached.home / "cache" / "v0" / "old"
    for _ in range(10):  # the janitor looks by itself, too, every five seconds, and may find it first
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"x" * 5000)
        would, was_left = cached.ctl("cache", "gc", "--dry-run").stdout, stray.exists()
        did = cached.ctl("cache", "gc").stdout
        if did != "nothing to delete\n":
            break
    assert "would delete 1 files of an older format" in would and was_left
    assert "deleted 1 files of an older format" in did
    assert not stray.exists()
    assert cached.ctl("cache", "gc").stdout == "nothing to delete\n"


def test_a_probe_says_what_of_a_prompt_is_cached_and_where(cached: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt(1)}]}
    known = cached.post("/api/cache/probe", body).json()
    assert known["hot"] + known["cold"] == known["prompt_tokens"] - 1  # one token is always computed
    assert known["missing"] == 1
    body["messages"][0]["content"] += " and something that nobody has asked before " * 10
    longer = cached.post("/api/cache/probe", body).json()
    assert longer["missing"] > 64 and longer["hot"] + longer["cold"] >= 192
    assert longer["prompt_tokens"] == longer["hot"] + longer["cold"] + longer["missing"]
    salted = cached.post("/api/cache/probe", {**body, "cache_salt": "another"}).json()
    assert salted["hot"] == salted["cold"] == 0
    answer = cached.chat("tiny", body["messages"][0]["content"], max_tokens=1)
    assert answer.cached_tokens == longer["hot"] + longer["cold"]


def test_a_probe_loads_nothing(tiny: Path) -> None:
    with running({"tiny": tiny}) as server:
        refused = server.post("/api/cache/probe", {"model": "tiny", "prompt": "hello"})
        assert (refused.status, refused.error["code"]) == (409, "model_not_loaded")
        assert server.model("tiny")["state"] == "idle"
        assert server.post("/api/ssd-cache/clear", {}).json()["deleted_files"] == 0


def test_explain_answers_by_request_id(cached: Server) -> None:
    first = cached.chat("tiny", prompt(1) + "with one end", max_tokens=1)
    second = cached.chat("tiny", prompt(1) + "and quite another", max_tokens=1)
    assert first.status == second.status == 200
    assert cached.ctl("cache", "explain", second.headers["x-request-id"]).stdout.strip()
    assert cached.ctl("cache", "explain", "req_nobody", check=False).returncode == 4


def test_clear_empties_the_store_and_the_loaded_model_goes_on(tiny: Path) -> None:
    with running({"tiny": tiny}, {"cache": {"hot_cache_max_size": "1MB"}}) as server:
        first = server.chat("tiny", prompt(1), max_tokens=4)
        usage, root = first.json()["usage"], server.home / "cache"
        blocks = (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // 64  # nothing follows the last token
        server.wait_for(lambda: len(blocks_in(root)) == blocks, 10, "all blocks are on disk")
        done = server.ctl("cache", "clear", check=False)
        assert done.returncode == 2 and "--yes" in done.stderr
        assert server.ctl("cache", "clear", "nope", "--yes", check=False).returncode == 4
        assert blocks_in(root)
        assert "deleted" in server.ctl("cache", "clear", "tiny", "--yes").stdout
        assert not blocks_in(root)
        assert ask(server, 1) == first.text
        server.wait_for(lambda: len(blocks_in(root)) == blocks, 10, "they are written anew")
        cleared = server.post("/api/ssd-cache/clear", {"model": "tiny"}).json()
        assert cleared["status"] == "ok" and cleared["deleted_files"] > 0 and cleared["deleted_bytes"] > 0
        assert not blocks_in(root)


def test_without_a_server_the_same_commands_work_on_the_files(tiny: Path) -> None:
    with home_with({"tiny": tiny}) as home:
        server = Server(home)
        assert "nothing is cached" in server.ctl("cache", "verify").stdout
        assert server.ctl("cache", "gc").stdout == "nothing to delete\n"
        server.start()
        ask(server, 1)
        server.stop()
        root = home / "cache"
        assert blocks_in(root)
        shown = cache_stats(server)
        assert shown["server"] is None and shown["namespaces"][0]["blocks"] == len(blocks_in(root))
        assert "not running" in server.ctl("cache", "stats").stdout
        assert "are sound" in server.ctl("cache", "verify").stdout
        assert "nothing to delete" in server.ctl("cache", "gc", "--dry-run").stdout
        assert "deleted" in server.ctl("cache", "clear", "--yes").stdout
        assert not blocks_in(root)


def test_a_directory_without_our_marker_is_never_touched(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with home_with({"tiny": tiny}) as home:
        server = Server(home, {"cache": {"ssd_cache_dir": str(tmp_path)}})
        for words in (("stats",), ("verify",), ("gc",), ("clear", "--yes")):
            done = server.ctl("cache", *words, check=False)
            assert (done.returncode, "left alone" in done.stderr) == (5, True), words
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_small_cap_holds_at_every_sample_through_worker_kills(tiny: Path) -> None:
    """Write credits at work: the janitor alone would be late by up to five seconds."""
    cap = 3 * MIB // 2
    settings = {"cache": {"ssd_cache_max_size": str(cap), "hot_cache_max_size": "1MB"}, "timers": {"backoff_first_s": 0.1}}
    with running({"tiny": tiny}, settings) as server:
        root = server.home / "cache"
        most, samples, over = 0, 0, threading.Event()

        def watch() -> None:
            nonlocal most, samples
            while not over.wait(0.003):
                most, samples = max(most, used_bytes(root)), samples + 1

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(300):
                answer = server.chat("tiny", prompt(number, 12), max_tokens=1)
                assert answer.status in (200, 503), answer
                if number in (10, 25):
                    os.kill(server.pid_of("tiny"), signal.SIGKILL)
                if number > 25 and number % 10 == 0 and cache_stats(server)["server"]["deleted_files"]:
                    break
        finally:
            over.set()
            watcher.join()
        assert samples > 100
        assert cap // 3 < most <= cap, most
        assert cache_stats(server)["server"]["deleted_files"] > 0


def trouble(server: Server) -> list[str]:
    return [warning for warning in server.status()["warnings"] if "prefix cache on disk" in warning]


def test_the_store_is_removed_while_serving_then_comes_back(tiny: Path, tmp_path: Path) -> None:
    """As if the disk had been unplugged: answers go on, one warning, and it heals by itself."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with running({"tiny": tiny}, {"cache": {"ssd_cache_dir": str(disk / "cache"), "hot_cache_max_size": "1MB"}}) as server:
        before = ask(server, 1)
        server.wait_for(lambda: blocks_in(disk), 10, "the blocks are on disk")
        disk.rename(tmp_path / "unplugged")
        for number in range(2, 5):
            ask(server, number)
        server.wait_for(lambda: trouble(server), 10, "status warns")
        [warning] = trouble(server)
        assert "by tiny" in warning and "missing" in warning
        assert "warning: the prefix cache on disk" in server.ctl("status").stderr
        assert ask(server, 1) == before
        server.wait_for(lambda: "WARNING store: " in server.said(), 10, "the log warns")
        assert server.said().count("WARNING store: ") == 1
        (tmp_path / "unplugged").rename(disk)
        server.wait_for(lambda: ask(server, 6) and not trouble(server), 50, "the warning is gone")


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size, where it may be mounted."""
    place = Path(tempfile.mkdtemp(prefix="omxd", dir="/tmp"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)]
    mount = shutil.which("mount")
    if mount is None or subprocess.run(command, capture_output=True).returncode != 0:
        place.rmdir()
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def test_a_full_disk_costs_the_cache_and_no_answer(tiny: Path) -> None:
    with small_disk(16 * MIB) as disk:
        settings = {"cache": {"ssd_cache_dir": str(disk / "cache"), "ssd_cache_max_size": "12MB", "hot_cache_max_size": "1MB"}}
        with running({"tiny": tiny}, settings) as server:
            before = ask(server, 1)
            server.wait_for(lambda: blocks_in(disk), 10, "the blocks are on disk")
            server.wait_for(lambda: worker(server)["credit_bytes"] > MIB, 20, "the worker has credit")
            with kept_full(disk / "filler"):
                for number in range(2, 12):
                    ask(server, number)
                server.wait_for(lambda: ask(server, int(time.time())) and trouble(server), 20, "status warns")
                assert "full: " in trouble(server)[0]
                assert ask(server, 1) == before
            server.wait_for(lambda: drops(server) > 0, 5, "what could not be written is counted")
            (disk / "filler").unlink()
            server.wait_for(lambda: ask(server, int(time.time())) and len(blocks_in(disk)) > 4, 50, "blocks are written again")


def drops(server: Server) -> int:
    counters = worker(server)["counters"]
    return counters.get("drop_failed", 0) + counters.get("drop_unavailable", 0)


@contextmanager
def kept_full(path: Path) -> Iterator[None]:
    """Something else takes every byte, also those that the janitor frees."""
    over = threading.Event()

    def fill() -> None:
        with path.open("ab", buffering=0) as file:
            while not over.wait(0.01):
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    continue

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()
