"""`dmfs status`: from daemons that answer, hang, or are not there; as JSON and as a table."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmfs import runtime
from dmfs.cli import main
from dmfs.fuse import mounting


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


STATUS = {
    "mountpoint": "/mnt/dm",
    "source": {"path": "/lustre", "opens": 1281167, "reads": 1, "bytes": 1 << 40, "stats": 1281167, "listings": 1001},
    "dataset_id": "/lustre/imagenet",
    "state": "mounted",
    "front_end": "kernel",
    "io_mode": "plain",
    "io_mode_reason": "each range that is not in the page cache is a message",
    "version": "0.1.0",
    "pid": 12345,
    "user": "alice",
    "uptime_s": 7512.3,
    "tiers": [
        {"path": "/nvme/dmfs", "capacity_bytes": 1 << 37, "used_bytes": 1 << 36, "copies": 1281167, "state": "ok"},
        {"path": "/" + "long/" * 30, "capacity_bytes": 1, "used_bytes": 0, "copies": 0, "state": "failing: I/O error"},
    ],
    "served": {
        "local": {"opens": 3843501, "reads": 9843501, "bytes": 1 << 42},
        "peer": {"opens": 0, "reads": 0, "bytes": 0},
        "source": {"opens": 12, "reads": 120, "bytes": 4096},
        "kernel": {"opens": 7, "file_bytes": 1 << 30},
    },
    "fills": {"active": 8, "queued": 120, "done": 1281167, "failed": 2, "bytes": 1 << 40},
    "known": {"inodes": 1, "files_open": 1, "directories_open": 0},
    "waiting": [{"path": f"train/\udcff\n{number}.JPEG", "age_s": 12.3} for number in range(20)],
    "stale_served": 0,
    "surprises": 0,
    "errors": [{"message": "cannot write to /nvme: No space left on device", "count": 3, "last": 1.0}],
}  # fmt: skip


@pytest.fixture
def daemon() -> Iterator[Callable[..., runtime.MountRecord]]:
    """Makes daemons out of threads: lock, socket, and one answer to all; with None it never answers."""
    with contextlib.ExitStack() as stack:

        def start(mountpoint: str, answer: dict[str, Any] | None) -> runtime.MountRecord:
            record = runtime.MountRecord(mountpoint, "/lustre/imagenet", os.getpid(), time.time())
            lock = runtime.acquire(mountpoint, record)
            stack.callback(lock.release)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            with runtime.socket_address(lock.socket) as address:
                listener.bind(address)
            listener.listen()
            if answer is not None:
                thread = threading.Thread(target=serve, args=(listener, answer))
                thread.start()
                stack.callback(thread.join, 10)
                stack.callback(stop, lock.socket)
            return record

        yield start


def serve(listener: socket.socket, answer: dict[str, Any]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            if not connection.recv(1000):
                return
            connection.sendall(json.dumps(answer).encode() + b"\n")


def stop(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection, runtime.socket_address(path) as address:
        connection.connect(address)


StartDaemon = Callable[..., runtime.MountRecord]


class TestStatus:
    def test_nothing_mounted(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["status"]) == 0
        assert capsys.readouterr().out == "No dmfs mounts of this user on this node.\n"
        assert main.run(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []

    def test_not_mounted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["status", str(tmp_path), "--json"]) == 8
        assert capsys.readouterr() == (
            "",
            f"dmfs: {tmp_path} is not mounted by dmfs: dmfs status lists the mounts of this user\n",
        )

    def test_dead_mount(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        table = mounting.MountInfo(1, 0, "0:42", str(tmp_path), "fuse.dmfs", "dmfs:/s")
        monkeypatch.setattr(mounting, "find_mount", lambda path: table)
        assert main.run(["status", str(tmp_path)]) == 8
        assert "no daemon of this user serves it: unmount it with: dmfs umount" in capsys.readouterr().err

    def test_json(self, daemon: StartDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        daemon("/mnt/dm", STATUS)
        assert main.run(["status", "/mnt/../mnt/dm", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == STATUS
        daemon("/mnt/b", {**STATUS, "mountpoint": "/mnt/b"})
        assert main.run(["status", "--json"]) == 0
        assert [mount["mountpoint"] for mount in json.loads(capsys.readouterr().out)] == ["/mnt/dm", "/mnt/b"]

    def test_table(self, daemon: StartDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        daemon("/mnt/dm", STATUS)
        assert main.run(["status"]) == 0
        text = capsys.readouterr().out
        lines = text.splitlines()
        assert [line for line in lines if len(line) > 80 or line != line.rstrip()] == []
        assert "\x1b" not in text
        assert lines[0] == "/mnt/dm  mounted"
        for expected in (
            "  source     /lustre",
            "  daemon     dmfs 0.1.0, pid 12345, user alice, up 2 h 5 min",
            "             local   3,843,501  9,843,501          4.0 TiB",
            "             source         12        120          4.0 KiB",
            "             kernel          7             at most 1.0 GiB",
            "  fills      8 active, 120 queued, 1,281,167 done, 2 failed, 1.0 TiB copied",
            "  waiting    12 s  train/\\udcff\\n0.JPEG",
            "             and 12 more, see --json",
        ):
            assert expected in lines
        assert ["64.0", "GiB", "128.0", "GiB", "1,281,167", "ok", "/nvme/dmfs"] in [line.split() for line in lines]

    @pytest.mark.slow
    def test_unresponsive(self, daemon: StartDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        """Two that hang cost no more than one, and hide none that lives."""
        daemon("/mnt/a", None)
        daemon("/mnt/b", None)
        daemon("/mnt/dm", STATUS)
        start = time.monotonic()
        assert main.run(["status", "--json"]) == 0
        assert time.monotonic() - start < 2
        answers = json.loads(capsys.readouterr().out)
        hung = {"source": {"path": "/lustre/imagenet"}, "pid": os.getpid(), "state": "unresponsive"}
        assert answers == [{"mountpoint": "/mnt/a", **hung}, {"mountpoint": "/mnt/b", **hung}, STATUS]
        assert main.run(["status", "/mnt/a"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "/mnt/a  unresponsive",
            "  source  /lustre/imagenet",
            f"  daemon  pid {os.getpid()} does not answer; dmfs umount --force ends it",
        ]

    @pytest.mark.slow
    def test_table_loads_no_more_than_rich(self, daemon: StartDaemon) -> None:
        daemon("/mnt/dm", STATUS)
        code = (
            "import sys; from dmfs.cli.main import run; run(['status']); "
            "print(*{'trio', 'pydantic', 'msgpack', 'yaml', 'rich'} & set(sys.modules), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
        assert done.stderr == "rich\n"
