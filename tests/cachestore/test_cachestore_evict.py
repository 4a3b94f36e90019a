import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.index import Entry, What
from cachestore.store import Store
from cachestore.sweep import Plan, Policy, clear, plan, run_pass
from tests.cachestore.cachestore_stand import block_file, files_below, make_block, make_chain, make_namespace

NOW_NS = 10**18
ROOMY = Policy(max_bytes=1 << 50, min_free_bytes=0)
NOTHING = Policy(max_bytes=0, min_free_bytes=0)
CHAIN = make_chain(20)

entries = st.lists(
    st.builds(
        Entry,
        st.uuids().map(str),
        st.sampled_from(What),
        st.integers(0, 1000),
        st.integers(NOW_NS - 10**15, NOW_NS),
        st.integers(NOW_NS - 10**15, NOW_NS),
    ),
    max_size=30,
    unique_by=lambda entry: entry.path,
)


def left_bytes(found: list[Entry], chosen: Plan) -> int:
    return sum(entry.size_bytes for entry in found) - sum(entry.size_bytes for entry in chosen.doomed)


@given(entries, st.integers(0, 20_000), st.integers(0, 5000), st.integers(0, 5000))
def test_a_plan_keeps_the_cap_and_the_floor_if_deleting_blocks_can(found: list[Entry], cap: int, free: int, floor: int) -> None:
    chosen = plan(found, free, Policy(cap, floor), NOW_NS)
    freed = sum(entry.size_bytes for entry in chosen.doomed)
    evictable = [entry for entry in found if entry.what in (What.BLOCK, What.BAD)]
    if not all(entry in chosen.doomed for entry in evictable):
        assert left_bytes(found, chosen) <= cap
        assert free + freed >= floor
    assert all(entry.what is not What.FIXTURE for entry in chosen.doomed)
    assert len(set(chosen.doomed)) == len(chosen.doomed)


@given(entries, st.integers(0, 20_000))
def test_no_block_goes_before_one_that_was_used_longer_ago(found: list[Entry], cap: int) -> None:
    chosen = plan(found, 0, Policy(cap, 0), NOW_NS)
    gone = [entry.used_ns for entry in chosen.doomed if entry.what is What.BLOCK]
    kept = [entry.used_ns for entry in found if entry.what is What.BLOCK and entry not in chosen.doomed]
    assert not gone or not kept or max(gone) <= min(kept)


def test_a_store_above_its_cap_shrinks_to_nine_tenths_of_it() -> None:
    found = [Entry(str(age), What.BLOCK, 10, NOW_NS - age, NOW_NS) for age in range(101)]
    chosen = plan(found, 0, Policy(1000, 0), NOW_NS)
    assert [entry.path for entry in chosen.doomed] == [str(age) for age in range(100, 89, -1)]
    assert not plan(found[:100], 0, Policy(1000, 0), NOW_NS).doomed


def fill(root: Path, fingerprint: str = "f" * 64) -> Store:
    store = Store(root, replace(make_namespace(), fingerprint=fingerprint))
    for block_id in CHAIN:
        store.put(make_block(block_id, floats=2000))
    store.touch_chain([block_id.key for block_id in CHAIN])
    return store


def used_bytes(root: Path) -> int:
    """Of what is there and stays: a janitor may be at work."""
    used = 0
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


def age(path: Path, seconds: float) -> None:
    os.utime(path, (then := time.time() - seconds, then))


def test_one_cap_holds_over_all_models_and_the_oldest_go_first(root: Path) -> None:
    first, second = fill(root), fill(root, "e" * 64)
    cap = used_bytes(root) * 3 // 4
    report = run_pass(root, Policy(cap, 0))
    assert used_bytes(root) <= cap
    assert report.deleted_files[What.BLOCK] == 40 - len(files_below(root, "*.safetensors"))
    assert all(second.contains(block_id.key) for block_id in CHAIN)
    kept = [first.contains(block_id.key) for block_id in CHAIN]
    assert kept == sorted(kept, reverse=True)  # what is left of the chain is its beginning
    assert True in kept
    assert False in kept


def test_a_chain_that_is_used_survives_one_that_is_not(root: Path) -> None:
    first, second = fill(root), fill(root, "e" * 64)
    first.touch_chain([block_id.key for block_id in CHAIN])
    run_pass(root, Policy(used_bytes(root) * 3 // 4, 0))
    assert all(first.contains(block_id.key) for block_id in CHAIN)
    assert not all(second.contains(block_id.key) for block_id in CHAIN)


def test_a_disk_that_fills_up_is_given_space(root: Path) -> None:
    fill(root)
    run_pass(root, Policy(1 << 50, 1 << 60))
    assert not files_below(root, "*.safetensors")


def test_rubbish_goes_when_it_is_old_and_not_before(root: Path) -> None:
    fill(root)
    prefix = block_file(root, CHAIN[0]).parent
    (prefix / "fresh.tmp").write_bytes(b"x")
    (prefix / "old.tmp").write_bytes(b"x")
    age(prefix / "old.tmp", 601)
    bad = block_file(root, CHAIN[1])
    bad.rename(bad.with_name(bad.name + ".bad"))  # just renamed: old by its last use, but nobody has looked at it yet
    age(bad.with_name(bad.name + ".bad"), 1e6)
    (root / "v0" / "deep" / "er").mkdir(parents=True)
    (root / "v0" / "deep" / "er" / "block").write_bytes(b"x" * 5000)
    report = run_pass(root, ROOMY)
    assert {what: count for what, count in report.deleted_files.items() if count} == {"temporary": 1, "stale_format": 1}
    assert not (root / "v0").exists()
    assert (prefix / "fresh.tmp").exists()
    assert len(files_below(root, "*.bad")) == 1


def test_bad_blocks_are_the_first_to_go_and_a_directory_among_them_goes_too(root: Path) -> None:
    fill(root)
    bad = block_file(root, CHAIN[1])
    bad.unlink()
    (bad.with_name(bad.name + ".bad") / "inside").mkdir(parents=True)
    (bad.with_name(bad.name + ".bad") / "inside" / "file").write_bytes(b"x" * 10_000)
    run_pass(root, Policy(used_bytes(root) - 1, 0))
    assert not bad.with_name(bad.name + ".bad").exists()


def test_a_newer_format_and_unknown_files_count_but_stay(root: Path) -> None:
    fill(root)
    (root / "v2").mkdir()
    (root / "v2" / "block.safetensors").write_bytes(b"x" * 5000)
    (root / "v1" / "notes.txt").write_text("mine")
    before = run_pass(root, ROOMY).total_bytes
    assert before >= used_bytes(root / "v1") + 5000
    run_pass(root, NOTHING)
    assert {path.name for path in files_below(root)} == {"block.safetensors", "notes.txt", "namespace.json", ".omlxd-cache"}


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    fill(root)
    outside = tmp_path / "outside"
    shutil.copytree(root / "v1", outside)
    (root / "v0").symlink_to(outside)
    (root / "v1" / "link").symlink_to(outside)
    block_file(root, CHAIN[0]).parent.joinpath("0" * 64 + ".safetensors").symlink_to(outside / "nothing")
    run_pass(root, NOTHING)
    assert len(files_below(outside, "*.safetensors")) == len(CHAIN)
    assert not files_below(root / "v1", "*.safetensors")


@pytest.mark.parametrize("state", ["missing", "not_ours"])
def test_nothing_is_deleted_or_made_without_the_marker(root: Path, state: str) -> None:
    if state == "not_ours":
        fill(root)
        (root / ".omlxd-cache").unlink()
    before = sorted(root.rglob("*"))
    assert run_pass(root, NOTHING).state == state
    assert sorted(root.rglob("*")) == before


def test_a_dry_run_reports_what_a_real_one_would_do_and_deletes_nothing(root: Path) -> None:
    fill(root)
    policy = Policy(used_bytes(root) // 2, 0)
    before = sorted(root.rglob("*"))
    dry = run_pass(root, policy, dry_run=True)
    assert sorted(root.rglob("*")) == before
    real = run_pass(root, policy)
    assert (dry.deleted_files[What.BLOCK], dry.deleted_bytes) == (real.deleted_files[What.BLOCK], real.deleted_bytes)
    assert real.deleted_bytes > 0


def test_an_empty_namespace_is_tidied_away_when_it_is_old_and_can_be_written_again(root: Path) -> None:
    store = fill(root)
    run_pass(root, NOTHING)
    namespace = root / "v1" / ("f" * 16 + "-" + "1" * 16)
    assert namespace.exists()
    for path in namespace.rglob("*"):
        age(path, 700)
    run_pass(root, NOTHING)
    age(namespace, 700)
    assert run_pass(root, NOTHING).deleted_files["empty_namespace"] == 1
    assert not namespace.exists()
    assert store.put(make_block(CHAIN[0]))
    assert (namespace / "namespace.json").exists()


# --- the process ---

WAITS_S = 60
"""For a process to end that is to end at once."""


@contextmanager
def janitor(root: Path, *options: str, **more: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "cachestore.evict", "--root", str(root), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload]
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def line(child: subprocess.Popen[str]) -> dict[str, object]:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def test_the_janitor_holds_the_cap_while_a_worker_writes(root: Path) -> None:
    store = fill(root)
    cap = used_bytes(root)
    with janitor(root, "--max-bytes", str(cap), "--min-free-bytes", "0", "--interval", "0.02") as child:
        assert line(child)["state"] == "ok"
        for block_id in make_chain(60, salt="other"):
            store.put(make_block(block_id, floats=2000))
        while not line(child)["deleted_files"]:
            pass
        while used_bytes(root) > cap:
            (root / "v1" / "news").touch()  # a file that came within a tick of the clock after a look is seen with the next
            (root / "v1" / "news").unlink()
            time.sleep(0.02)


def test_the_janitor_ends_with_its_parent(root: Path) -> None:
    fill(root)
    held, kept = os.pipe()
    options = ("--max-bytes", "0", "--min-free-bytes", "0", "--interval", "60", "--lifeline-fd", str(held))
    with janitor(root, *options, pass_fds=[held]) as child:
        os.close(held)
        line(child)
        os.close(kept)
        assert child.wait(WAITS_S) == 0


def test_the_janitor_ignores_the_terminals_signals_and_obeys_sigterm(root: Path) -> None:
    fill(root)
    with janitor(root, "--max-bytes", "0", "--min-free-bytes", "0", "--interval", "60") as child:
        line(child)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
        child.terminate()
        assert child.wait(WAITS_S) == 0


def test_the_janitor_says_when_the_store_comes_and_goes(root: Path) -> None:
    with janitor(root, "--max-bytes", "1000000000", "--min-free-bytes", "0", "--interval", "0.02") as child:
        assert line(child)["state"] == "missing"
        fill(root)
        while line(child)["state"] != "ok":
            pass
        root.rename(root.with_name("unplugged"))
        while line(child)["state"] != "missing":
            pass


def test_one_dry_pass_from_the_command_line(root: Path) -> None:
    fill(root)
    with janitor(root, "--max-bytes", "0", "--min-free-bytes", "0", "--once", "--dry-run") as child:
        said = line(child)
        assert child.wait(WAITS_S) == 0
    assert said["dry_run"] is True
    assert said["deleted_files"] == {"block": len(CHAIN)}
    assert len(files_below(root, "*.safetensors")) == len(CHAIN)


def test_an_idle_janitor_does_not_walk_the_store(root: Path) -> None:
    """A block that only an unconditional walk would find over the cap stays: nothing came or went since the first pass."""
    fill(root)
    path = block_file(root, CHAIN[0])
    with janitor(root, "--max-bytes", str(2 * used_bytes(root)), "--min-free-bytes", "0", "--interval", "0.01") as child:
        line(child)
        time.sleep(0.1)
        os.truncate(path, 1 << 30)
        time.sleep(0.2)
        assert path.exists()
        (path.parent / "news").touch()
        assert line(child)["deleted_files"]


@contextmanager
def orderly(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A janitor with a lifeline, and the end that orders go into."""
    held, kept = os.pipe()
    policy = ("--min-free-bytes", "0", "--interval", "60", "--lifeline-fd", str(held))
    with janitor(root, *policy, *options, pass_fds=[held]) as child:
        os.close(held)
        yield child, kept
        os.close(kept)


def test_the_janitor_looks_when_told_to_and_says_when_its_look_began(root: Path) -> None:
    store = fill(root)
    with orderly(root, "--max-bytes", str(1 << 40)) as (child, orders):
        first = line(child)
        assert store.put(make_block(make_chain(1, salt="new")[0], floats=2000))
        now = time.monotonic()
        os.write(orders, b'{"do": "pass", "id": "7"}\n')
        second = line(child)
    assert second["id"] == "7" and second["event"] == "cache_pass"
    assert now <= second["began"] <= time.monotonic()
    assert second["left_bytes"] == second["bytes"] > first["bytes"]


def test_a_dry_pass_and_a_clearing_are_ordered_on_the_lifeline(root: Path) -> None:
    fill(root)
    other = Store(root, replace(make_namespace(), fingerprint="e" * 64, model="org/other"))
    assert other.put(make_block(CHAIN[0]))
    with orderly(root, "--max-bytes", str(1 << 40)) as (child, orders):
        line(child)
        os.write(orders, b'nonsense\n[1]\n{"do": "clear", "model": "org/model", "id": "a"}\n{"do": "dance", "id": "b"}\n')
        cleared = line(child)
        assert (cleared["event"], cleared["id"], cleared["deleted_files"]) == ("cache_clear", "a", {"block": len(CHAIN)})
        assert line(child) == {"event": "unknown_order", "id": "b"}
    assert other.contains(CHAIN[0].key)
    assert len(files_below(root, "*.safetensors")) == 1


def test_clearing_leaves_what_a_writer_may_be_at_and_the_writer_goes_on(root: Path) -> None:
    store = fill(root)
    bad = block_file(root, CHAIN[1])
    bad.rename(bad.with_name(bad.name + ".bad"))
    (bad.parent / "fresh.tmp").write_bytes(b"x")
    report = clear(root)
    assert {what: count for what, count in report.deleted_files.items() if count} == {"block": len(CHAIN) - 1, "bad": 1}
    assert (bad.parent / "fresh.tmp").exists()
    assert not store.contains(CHAIN[0].key)
    assert store.put(make_block(CHAIN[0])) and store.contains(CHAIN[0].key)


@pytest.mark.parametrize("state", ["missing", "not_ours"])
def test_nothing_is_cleared_without_the_marker(root: Path, state: str) -> None:
    if state == "not_ours":
        fill(root)
        (root / ".omlxd-cache").unlink()
    before = sorted(root.rglob("*"))
    assert clear(root).state == state
    assert sorted(root.rglob("*")) == before


def test_what_another_process_took_away_first_was_not_freed_by_this_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block renamed to .bad between look and deletion still takes its bytes."""
    fill(root)
    real = Path.unlink

    def renamed_first(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".safetensors"):
            path.rename(path.with_name(path.name + ".bad"))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", renamed_first)
    report = run_pass(root, NOTHING)
    assert report.deleted_bytes == 0
    assert report.left_bytes == report.total_bytes
