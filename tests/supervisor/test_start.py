"""What is settled before anything is served: port, lock, directories, memory. Each refusal names its reason."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from supervisor import hardware
from supervisor.http_port import AddressUnusable, PortTaken, bind
from supervisor.instance import AlreadyRunning, InstanceLock, running_pid
from supervisor.ipc import MAX_PATH_BYTES, PathTooLong
from supervisor.paths import HomeUnusable, paths_of, prepare
from supervisor.settings import ServerSettings, Settings

# The port


def test_port_0_takes_a_free_one_and_listens_at_once() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        assert not os.get_inheritable(listener.fileno())
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            pass


def test_a_taken_port_is_refused_with_the_one_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken) as caught:
            bind("127.0.0.1", port)
    assert caught.value.pid == os.getpid()
    assert f"127.0.0.1:{port}" in str(caught.value) and "--port" in str(caught.value)


def test_a_port_is_free_again_right_after_a_connection_was_cut() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    first.setblocking(True)
    served, _ = first.accept()
    served.close()
    first.close()
    client.close()
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused_as_such(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(AddressUnusable, match=host):
        bind(host, other.getsockname()[1])  # somebody listens on that port elsewhere: that is not the reason


def test_localhost_is_where_127_0_0_1_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    with contextlib.closing(bind("localhost", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# The lock


def test_a_second_server_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    lock = InstanceLock(tmp_path / "lock")
    with pytest.raises(AlreadyRunning) as caught:
        InstanceLock(tmp_path / "lock")
    assert caught.value.pid == os.getpid() == running_pid(tmp_path / "lock")
    lock.release()
    assert running_pid(tmp_path / "lock") is None
    InstanceLock(tmp_path / "lock").release()


def test_the_lock_goes_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from supervisor.instance import InstanceLock\n"
    code += "lock = InstanceLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert running_pid(tmp_path / "lock") == holder.pid
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert running_pid(tmp_path / "lock") is None
    InstanceLock(tmp_path / "lock").release()


def test_no_child_inherits_the_lock(tmp_path: Path) -> None:
    lock = InstanceLock(tmp_path / "lock")
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    lock.release()
    assert running_pid(tmp_path / "lock") is None
    child.kill()
    child.wait()


def test_looking_whether_a_server_runs_never_keeps_one_from_starting(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            running_pid(tmp_path / "lock")

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            InstanceLock(tmp_path / "lock").release()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


# The directories


def test_the_directories_are_made_and_the_sockets_place_is_private(tmp_path: Path) -> None:
    paths = paths_of(tmp_path / "home", Settings())
    prepare(paths)
    prepare(paths)
    assert all(path.is_dir() for path in (paths.run, paths.logs, paths.models, paths.state))
    assert paths.run.stat().st_mode & 0o777 == 0o700
    paths.run.chmod(0o755)
    prepare(paths)
    assert paths.run.stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeUnusable, match="OMLX_HOME") as caught:
        prepare(paths_of(tmp_path / "file" / "home", Settings()))
    assert str(tmp_path / "file") in str(caught.value)


def test_a_home_too_deep_for_sockets_is_named_before_anything_is_made(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * MAX_PATH_BYTES)
    with pytest.raises(PathTooLong):
        prepare(paths_of(deep, Settings()))
    assert not deep.exists()


def test_a_run_dir_of_its_own_helps_a_home_too_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * MAX_PATH_BYTES)
    prepare(paths_of(deep, Settings(server=ServerSettings(run_dir=str(tmp_path / "r")))))
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700


def test_a_run_dir_open_to_others_is_refused_and_not_changed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(HomeUnusable, match="chmod 700"):
        prepare(paths_of(tmp_path / "home", Settings(server=ServerSettings(run_dir=str(shared)))))
    assert shared.stat().st_mode & 0o777 == 0o777


# The memory


def test_the_limit_of_every_control_group_around_us_counts(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("1:cpu:/elsewhere\n0::/system.slice/omlxd.service\n")
    for place, text in (("", "max"), ("system.slice", "8000000"), ("system.slice/omlxd.service", "9000000\n")):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "memory.max").write_text(text)
    assert sorted(hardware.cgroup_limits_bytes(membership, root)) == [8_000_000, 9_000_000]
    assert hardware.cgroup_limits_bytes(tmp_path / "none", root) == []


def test_ram_is_never_more_than_there_is() -> None:
    assert 0 < hardware.total_ram_bytes() <= psutil.virtual_memory().total


def test_a_listener_of_the_life_before_is_kept_only_while_it_is_the_one_that_is_wanted() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    kept = bind("127.0.0.1", port, inherited=os.dup(first.fileno()))
    assert kept.getsockname() == first.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as held:
        free = held.getsockname()[1]
    moved = bind("127.0.0.1", free, inherited=kept.detach())
    assert moved.getsockname()[1] == free
    first.close()
    moved.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_lock_of_the_life_before_holds_on_and_one_of_another_directory_is_let_go(tmp_path: Path) -> None:
    first = InstanceLock(tmp_path / "a.lock")
    assert InstanceLock(tmp_path / "a.lock", inherited=first.fd).fd == first.fd
    moved = InstanceLock(tmp_path / "b.lock", inherited=first.fd)
    assert running_pid(tmp_path / "a.lock") is None and running_pid(tmp_path / "b.lock") == os.getpid()
    moved.release()
