"""`dmfs umount` without a mount: the end of daemons of all manners, and its refusals."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmfs import runtime
from dmfs.cli import main, umount
from dmfs.fuse import mounting


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)  # `dmfs umount` leaves the directory it was called in


DAEMON = """
import json, os, signal, socket, sys, time
from dmfs import runtime
mountpoint, manner = sys.argv[1:]
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = runtime.acquire(mountpoint, runtime.MountRecord(mountpoint, "/source", os.getpid(), time.time()))
listener = socket.socket(socket.AF_UNIX)
listener.bind(lock.socket)
listener.listen()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    request = json.loads(connection.recv(1000) or "{}")
    if manner == "silent":
        time.sleep(60)
    if request:
        connection.sendall(b'{"ok": true}\\n')
    connection.close()
    if request.get("op") == "stop" and manner == "well":
        lock.release()
        sys.exit()
"""


class TestUmount:
    """Of daemons whose mount is gone already, so that only they are left to be ended."""

    @pytest.fixture
    def start(self) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
        processes: list[subprocess.Popen[str]] = []

        def start(manner: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-c", DAEMON, "/mnt/dm", manner], stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield start
        for process in processes:
            process.kill()
            process.communicate(timeout=10)

    @pytest.mark.slow
    @pytest.mark.parametrize("arguments", [[], ["--force"]])
    def test_ends_the_daemon(self, start: Callable[[str], "subprocess.Popen[str]"], arguments: list[str]) -> None:
        process = start("well")
        assert main.run(["umount", "/mnt/dm", *arguments]) == 0
        assert process.wait(timeout=10) == 0
        assert runtime.records() == []

    @pytest.mark.slow
    @pytest.mark.parametrize("manner", ["stubborn", "silent"])
    def test_gives_up_on_one_that_stays(
        self,
        start: Callable[[str], "subprocess.Popen[str]"],
        manner: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for name, seconds in (
            ("ANSWER_TIMEOUT", 0.3),
            ("NOTICE_AFTER", 0.1),
            ("END_TIMEOUT", 0.4),
            ("HUNG_TIMEOUT", 0.2),
        ):
            monkeypatch.setattr(umount, name, seconds)
        process = start(manner)
        assert main.run(["umount", "/mnt/dm"]) == 10
        assert capsys.readouterr().err.splitlines() == [
            f"dmfs: /mnt/dm is unmounted; waiting for its daemon (pid {process.pid}) to end",
            f"dmfs: /mnt/dm is unmounted, but its daemon (pid {process.pid}) has not ended: "
            "end it with: dmfs umount --force /mnt/dm",
        ]
        assert process.poll() is None

    @pytest.mark.slow
    @pytest.mark.parametrize(("manner", "last"), [("stubborn", signal.SIGKILL), ("silent", signal.SIGTERM)])
    def test_force(
        self,
        start: Callable[[str], "subprocess.Popen[str]"],
        manner: str,
        last: signal.Signals,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("_ASK", "_STOP", "_TERM"):
            monkeypatch.setattr(umount, name, 0.2)
        process = start(manner)
        assert main.run(["umount", "--force", "/mnt/dm"]) == 0
        assert process.wait(timeout=10) == -last

    @pytest.mark.slow
    def test_force_on_a_stopped_one(self, start: Callable[[str], "subprocess.Popen[str]"]) -> None:
        process = start("well")
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert main.run(["umount", "--force", "/mnt/dm"]) == 0
        assert time.monotonic() - begin < 5
        assert process.wait(timeout=10) == -signal.SIGKILL

    @pytest.mark.slow
    def test_force_on_one_that_cannot_be_killed(
        self,
        start: Callable[[str], "subprocess.Popen[str]"],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for name in ("_ASK", "_STOP", "_TERM", "_KILL"):
            monkeypatch.setattr(umount, name, 0.05)
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
        process = start("stubborn")
        assert main.run(["umount", "--force", "/mnt/dm"]) == 10
        assert (
            f"its daemon (pid {process.pid}) cannot be killed: it is stuck in a call to the source /source"
            in capsys.readouterr().err
        )

    def test_foreign_mount(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["umount", "/proc"]) == 8
        assert capsys.readouterr().err == (
            "dmfs: /proc is a mount of proc (proc), not of dmfs: dmfs status lists the mounts of this user\n"
        )

    def test_busy(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def busy(path: str, *, lazy: bool = False) -> None:
            raise OSError(16, "Device or resource busy")

        users = [mounting.Process(100 + number, "python") for number in range(10)]
        table = mounting.MountInfo(1, 0, "0:42", "/mnt/dm", "fuse.dmfs", "dmfs:/s")
        monkeypatch.setattr(mounting, "find_mount", lambda path: table)
        monkeypatch.setattr(mounting, "is_dead", lambda path: False)
        monkeypatch.setattr(mounting, "unmount", busy)
        monkeypatch.setattr(mounting, "users_of", lambda mount: users)
        assert main.run(["umount", "/mnt/dm"]) == 9
        named = ", ".join(f"python (pid {100 + number})" for number in range(8))
        assert capsys.readouterr().err == (
            f"dmfs: /mnt/dm is in use by {named}, 2 more: end them, or unmount with: dmfs umount --force /mnt/dm\n"
        )
        users.clear()
        assert main.run(["umount", "/mnt/dm"]) == 9
        assert "in use by processes that this user cannot see" in capsys.readouterr().err
