"""Locks and records of mounts: who holds one, what the dead leave behind, and that nobody is mistaken for a daemon."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmfs import runtime
from dmfs.errors import MountpointError, UserError

HOLDER = """
import os, sys, time
from dmfs import runtime
mountpoint = sys.argv[1]
try:
    lock = runtime.acquire(mountpoint, runtime.MountRecord(mountpoint, "/source", os.getpid(), time.time()))
except Exception as exc:
    print(type(exc).__name__, exc, flush=True)
    sys.exit()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "dmfs"


@pytest.fixture
def start() -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def start(mountpoint: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, mountpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=10)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def record(mountpoint: str, *, source: str = "/source") -> runtime.MountRecord:
    return runtime.MountRecord(mountpoint, source, os.getpid(), time.time())


def test_record_is_found_while_the_lock_is_held(folder: Path) -> None:
    mine = record("/mnt/a b,\n\udcff")
    lock = runtime.acquire(mine.mountpoint, mine)
    assert runtime.records() == [mine]
    found = runtime.find(mine.mountpoint)
    assert found == mine
    assert found.socket == lock.socket
    assert os.path.dirname(lock.socket) == str(folder)
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert runtime.find("/mnt/other") is None
    lock.release()
    lock.release()
    assert runtime.records() == []
    assert list(folder.iterdir()) == []


def test_second_daemon_is_refused_with_the_pid_of_the_first() -> None:
    lock = runtime.acquire("/mnt/a b", record("/mnt/a b"))
    with pytest.raises(MountpointError, match=rf"pid {os.getpid()}; .*: dmfs umount '/mnt/a b'"):
        runtime.acquire("/mnt/a b", record("/mnt/a b", source="/second"))
    found = runtime.find("/mnt/a b")
    assert found is not None
    assert found.source == "/source"
    lock.release()


def test_lock_is_not_inherited_by_programs(start: Callable[[str], "subprocess.Popen[str]"]) -> None:
    lock = runtime.acquire("/mnt/a", record("/mnt/a"))
    child = start("/mnt/b")
    assert line(child) == "held"
    lock.release()
    runtime.acquire("/mnt/a", record("/mnt/a")).release()


@pytest.mark.slow
def test_killed_holder_leaves_nothing_in_the_way(start: Callable[[str], "subprocess.Popen[str]"], folder: Path) -> None:
    holder = start("/mnt/a")
    assert line(holder) == "held"
    found = runtime.find("/mnt/a")
    assert found is not None
    assert found.pid == holder.pid
    Path(found.socket).touch()
    holder.kill()
    holder.wait(timeout=10)
    assert runtime.records() == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_pid_of_a_dead_daemon_may_be_anybodys(start: Callable[[str], "subprocess.Popen[str]"], folder: Path) -> None:
    """E21: the number in the file is that of a living process (this one), the lock is not held."""
    lock = runtime.acquire("/mnt/a", record("/mnt/a"))
    [path] = folder.glob("*.lock")
    content = path.read_bytes()
    lock.release()
    path.write_bytes(content)
    path.with_suffix(".sock").touch()
    holder = start("/mnt/a")
    assert line(holder) == "held"
    found = runtime.find("/mnt/a")
    assert found is not None
    assert found.pid == holder.pid
    assert not path.with_suffix(".sock").exists()


@pytest.mark.slow
def test_stopped_holder_still_holds(start: Callable[[str], "subprocess.Popen[str]"]) -> None:
    holder = start("/mnt/a")
    assert line(holder) == "held"
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(MountpointError):
        runtime.acquire("/mnt/a", record("/mnt/a"))
    assert [found.pid for found in runtime.records()] == [holder.pid]


@pytest.mark.slow
def test_of_eight_at_once_one_gets_it(start: Callable[[str], "subprocess.Popen[str]"], folder: Path) -> None:
    """E21: beside leftovers, and while others look."""
    folder.mkdir(mode=0o700)
    (folder / runtime._name("/mnt/a")).write_text('{"mountpoint": "/mnt/a"}')
    holders = [start("/mnt/a") for _ in range(8)]
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            runtime.records()

    watcher = threading.Thread(target=look)
    watcher.start()
    answers = sorted(line(holder) for holder in holders)
    done.set()
    watcher.join(timeout=10)
    assert answers.count("held") == 1
    assert all(answer.startswith("MountpointError /mnt/a is already mounted") for answer in answers if answer != "held")
    [found] = runtime.records()
    assert found.pid in {holder.pid for holder in holders}


def test_those_who_look_never_stand_in_the_way() -> None:
    """Take and release as fast as it goes while four threads look and clear away: no take is ever refused."""
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            runtime.find("/mnt/a")
            runtime.records()

    watchers = [threading.Thread(target=look) for _ in range(4)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(50):
            lock = runtime.acquire("/mnt/a", record("/mnt/a"))
            assert runtime.find("/mnt/a") is not None
            lock.release()
    finally:
        done.set()
        for watcher in watchers:
            watcher.join(timeout=10)


def test_release_leaves_the_files_of_a_successor(folder: Path) -> None:
    first = runtime.acquire("/mnt/a", record("/mnt/a"))
    [path] = folder.glob("*.lock")
    path.unlink()  # somebody cleaned up by hand
    second = runtime.acquire("/mnt/a", record("/mnt/a"))
    first.release()
    assert runtime.find("/mnt/a") is not None
    second.release()


def test_fallback_without_xdg_runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "_fallback", lambda: str(tmp_path / "fallback"))
    for value in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert runtime.runtime_dir() == str(tmp_path / "fallback")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime.runtime_dir() == str(tmp_path / "fallback")


def test_sessions_with_and_without_xdg_runtime_dir_see_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    login = tmp_path / "login"
    login.mkdir()
    monkeypatch.setattr(runtime, "_usual", lambda: str(login))
    monkeypatch.setattr(runtime, "_fallback", lambda: str(tmp_path / "fallback"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    first = runtime.acquire("/mnt/a", record("/mnt/a"))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    second = runtime.acquire("/mnt/b", record("/mnt/b"))
    with pytest.raises(MountpointError):
        runtime.acquire("/mnt/a", record("/mnt/a"))
    assert [found.mountpoint for found in runtime.records()] == ["/mnt/a", "/mnt/b"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert [found.mountpoint for found in runtime.records()] == ["/mnt/a", "/mnt/b"]
    first.release()
    second.release()


def test_open_modes_are_mended(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert runtime.runtime_dir() == str(folder)
    assert (folder.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_what_is_no_own_directory_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "symlink":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(UserError, match=f"{folder} is not a directory of this user: remove it, or set XDG_RUNTIME_DIR"):
        runtime.acquire("/mnt/a", record("/mnt/a"))
    assert runtime.records() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(UserError, match="is not a directory of this user"):
        runtime.runtime_dir()
    assert runtime.records() == []


def test_rubbish_in_the_folder_is_no_mount(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "rubbish.lock").write_bytes(b"\xff" * 100)
    (folder / "other").touch()
    (folder / "folder.lock").mkdir()
    (folder / "link.lock").symlink_to("/nowhere")
    assert runtime.records() == []
    assert not (folder / "rubbish.lock").exists()
    assert (folder / "other").exists()


def test_long_socket_paths_have_a_short_address(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    path = deep / "socket"
    path.touch()
    with runtime.socket_address(str(path)) as address:
        assert len(address) < 108
        assert os.path.samefile(address, path)
    with runtime.socket_address("/short") as address:
        assert address == "/short"
