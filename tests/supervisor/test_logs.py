"""The log of one process: lines whole, memory bounded, files rotated and one day removed."""

import logging
import os
import time
from pathlib import Path

import pytest

from supervisor import logs
from supervisor.logs import LINE_BYTES, RING_LINES, BookHandler, LogBook, log_file, remove_old_files


@pytest.fixture
def book(tmp_path: Path) -> LogBook:
    return LogBook("org/model", tmp_path)


def test_lines_are_put_together_however_they_arrive(book: LogBook) -> None:
    for piece in (b"one", b" line\ntwo\r\nthr", b"ee", b"\n"):
        book.feed(piece)
    assert book.tail(9) == ["one line", "two", "three"]


def test_an_unfinished_last_line_counts_once_the_process_is_gone(book: LogBook) -> None:
    book.feed(b"Segmentation fau")
    assert book.tail(9) == []
    book.end()
    book.end()
    assert book.tail(9) == ["Segmentation fau"]


def test_bytes_that_are_no_text_and_lines_without_end_do_no_harm(book: LogBook) -> None:
    book.feed(b"\xff\xfe\n")
    book.feed(b"x" * 3 * LINE_BYTES)
    book.feed(b"\nnext\n")
    assert book.tail(9)[0] == "��"
    assert book.tail(1) == ["next"]
    assert all(len(line) <= LINE_BYTES for line in book.tail(9))


def test_memory_holds_the_last_lines_only(book: LogBook) -> None:
    book.feed(b"".join(b"%d\n" % n for n in range(RING_LINES + 100)))
    assert book.tail(RING_LINES * 2)[0] == "100"
    assert book.tail(2) == [str(RING_LINES + 98), str(RING_LINES + 99)]
    assert book.tail(0) == [] and book.tail(-1) == [] and book.stamped(0) == []


def test_the_file_has_every_line_with_its_time_under_a_name_without_slashes(book: LogBook, tmp_path: Path) -> None:
    book.feed(b"hello\n")
    book.close()
    [line] = log_file(tmp_path, "org/model").read_text().splitlines()
    assert book.stamped(9) == [line], "from memory it reads as from the file"
    stamp, text = line.split(" ", 1)
    assert text == "hello"
    assert abs(time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S")) - time.time()) < 60


def test_every_name_has_a_file_of_its_own_however_long_or_odd_it_is(tmp_path: Path) -> None:
    names = ["plain", "a/b", "a_b", "a b", "../up", "漢" * 255, "o" * 255 + "/" + "n" * 255, "o" * 255 + "/" + "n" * 254]
    for name in names:
        book = LogBook(name, tmp_path)
        book.say(f"of {name}")
        book.close()
    assert len(list(tmp_path.iterdir())) == len(names)
    assert all(log_file(tmp_path, name).read_text().endswith(f" of {name}\n") for name in names)
    assert log_file(tmp_path, "plain").name == "plain.log"


def test_files_are_rotated_and_the_oldest_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    book = LogBook("m", tmp_path)
    for n in range(200):
        book.say(f"line {n:04d} of a process that has much to say")
    book.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["m.log", "m.log.1", "m.log.2", "m.log.3"]
    assert "line 0199" in (tmp_path / "m.log").read_text()
    assert all(path.stat().st_size <= 1100 for path in tmp_path.iterdir())


def test_a_follower_gets_new_lines_until_it_stops(book: LogBook) -> None:
    book.say("before")
    heard: list[str] = []
    stop = book.follow(heard.extend)
    book.feed(b"a\nb\n")
    stop()
    stop()
    book.say("after")
    assert heard == book.stamped(3)[:2] and [line.split(" ", 1)[1] for line in heard] == ["a", "b"]


def test_the_supervisors_own_records_are_lines_too(book: LogBook) -> None:
    logger = logging.getLogger("test.supervisor.logs")
    handler = BookHandler(book)
    logger.addHandler(handler)
    try:
        logger.error("%s went wrong", "it")
    finally:
        logger.removeHandler(handler)
    assert book.tail(1) == ["ERROR test.supervisor.logs: it went wrong"]


def test_a_disk_that_refuses_does_not_stop_the_log_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = LogBook("m", tmp_path / "gone")
    book.say("still here")
    assert book.tail(1) == ["still here"]


def test_old_files_go_and_others_stay(tmp_path: Path) -> None:
    for name, days in (("a.log", 8), ("a.log.1", 9), ("b.log", 6), ("notes.txt", 100)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (then := time.time() - days * 86400, then))
    assert remove_old_files(tmp_path, 7) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.log", "notes.txt"]
