"""What a server that is cut off was at is found by the next one; an end in order leaves nothing."""

import asyncio
import threading
from pathlib import Path

import pytest

from supervisor.breadcrumb import Breadcrumb, found


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_busy_models_are_named_after_an_end_without_warning_once(tmp_path: Path) -> None:
    path = tmp_path / "busy.json"
    left = Breadcrumb(path)
    left.at(["b"])
    left.at([])
    left.at(["a", "b"])
    await until(lambda: path.exists() and '"a", "b"' in path.read_text())
    said = found(path)
    assert said is not None and "busy with a, b" in said
    assert found(path) is None
    left.close()


async def test_a_pause_between_requests_writes_nothing_and_a_longer_one_forgets(tmp_path: Path) -> None:
    path = tmp_path / "busy.json"
    left = Breadcrumb(path, linger_s=0.05)
    left.at(["a", "b"])
    await until(path.exists)
    left.at(["a"])
    await until(lambda: '["a"]' in path.read_text())
    left.at([])
    await until(lambda: not path.exists())
    left.at(["b"])
    await until(path.exists)
    left.close()
    assert not path.exists(), "it ended in order"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"models": 7, "at": 1}', b'{"models": ["a"], "at": "then"}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_note_is_still_a_sign(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "busy.json"
    path.write_bytes(damage)
    said = found(path)
    assert said is not None and "did not end in order" in said and not path.exists()


async def test_a_place_that_cannot_be_written_costs_only_the_note(tmp_path: Path) -> None:
    left = Breadcrumb(tmp_path / "not there" / "busy.json")
    left.at(["a"])
    left.close()


async def test_that_it_cannot_be_written_is_logged_on_the_thread_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Followers of the log are sent it over sockets that no other thread may touch."""
    left = Breadcrumb(tmp_path / "not there" / "busy.json")
    left.at(["a"])
    await until(lambda: caplog.records)
    assert {record.thread for record in caplog.records} == {threading.get_ident()}
    left.close()
