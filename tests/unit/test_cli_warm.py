"""`dmfs warm` against the real control socket, with a handler that only remembers; the mount is a plain directory."""

import errno
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dmfs import control, runtime
from dmfs.cli import main, walk, warm
from dmfs.errors import ConfigError, DaemonUnresponsive
from dmfs.fuse import mounting
from dmfs.metrics import WarmProgress
from tests.support.waiting import wait_until

# The command forks; here the daemon is a thread, in the command line there are none.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

MiB = 1 << 20

Work = Callable[[list[bytes], WarmProgress], Awaitable[None]]


class Daemon:
    """The daemon of `folder`, in a thread.

    Attributes:
        batches: what it has been asked for: paths, whether to push, bytes pushed before.
        work: what it does with a batch; by default all files were there.
        is_hung: it does not answer any more.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[tuple[list[bytes], bool, int]] = []
        self.work: Work = self.all_there
        self.is_cancelled = threading.Event()
        self._lock = runtime.acquire(str(folder), runtime.MountRecord(str(folder), "/source", os.getpid(), 1.0))
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._is_ready.wait(5)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._serve)
                self._is_ready.set()

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        await control.serve(
            self._lock.socket,
            status=dict,
            stop=lambda force: None,
            warm=self._warm,
            surprised=lambda doing, exc: pytest.fail(repr(exc)),
            task_status=task_status,
        )

    async def _warm(self, paths: list[bytes], push: bool, pushed_bytes: int, progress: WarmProgress) -> None:
        self.batches.append((paths, push, pushed_bytes))
        try:
            await self.work(paths, progress)
        except trio.Cancelled:
            self.is_cancelled.set()
            raise

    async def all_there(self, paths: list[bytes], progress: WarmProgress) -> None:
        """A handler for which every file is in the cache already, and can be pushed."""
        for path in paths:
            size = (self.folder / os.fsdecode(path)).stat().st_size
            progress.files += 1
            progress.bytes += size
            if self.batches[-1][1] and size:
                progress.pushed += 1
                progress.pushed_bytes += size

    def asked(self) -> list[bytes]:
        """The paths of all batches."""
        return [path for paths, _, _ in self.batches for path in paths]

    def stop(self) -> None:
        """It is gone, without having unmounted."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._scope.cancel)
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._lock.release()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    made = tmp_path / "mnt"
    made.mkdir()
    device = made.stat().st_dev
    table = mounting.MountInfo(1, 0, f"{os.major(device)}:{os.minor(device)}", str(made), "fuse.dmfs", "dmfs:/source")
    monkeypatch.setattr(mounting, "find_mount", lambda path: table if path == str(made) else None)
    return made


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    made = Daemon(folder)
    yield made
    made.stop()


def fill(folder: Path) -> None:
    """a, d/b, d/e/c of 1, 2 and 3 bytes, an empty file, links and a pipe."""
    (folder / "d/e").mkdir(parents=True)
    for size, name in enumerate(("empty", "a", "d/b", "d/e/c")):
        (folder / name).write_bytes(b"x" * size)
    (folder / "link").symlink_to("d")
    (folder / "d/out").symlink_to("/etc/passwd")
    os.mkfifo(folder / "d/e/pipe")


class TestPaths:
    @pytest.mark.parametrize(
        ("cwd", "paths", "expected"),
        [
            ("/", ["."], [b"a", b"d/b", b"d/e/c", b"empty"]),
            ("/", ["d"], [b"d/b", b"d/e/c"]),
            ("/", ["./d/../a"], [b"a"]),
            ("/", ["{mnt}/d/e", "a"], [b"a", b"d/e/c"]),
            ("/", ["{mnt}"], [b"a", b"d/b", b"d/e/c", b"empty"]),
            ("{mnt}/d", ["b", "../a"], [b"a", b"d/b"]),
            ("{mnt}/d", ["."], [b"d/b", b"d/e/c"]),
            ("{mnt}/..", ["mnt/d/b", "a"], [b"a", b"d/b"]),
            ("{mnt}/..", ["view/d/b"], [b"d/b"]),
            ("/", ["{mnt}/../view/a"], [b"a"]),
            ("/", ["link"], [b"d/b", b"d/e/c"]),
            ("{mnt}", ["link/e"], [b"d/e/c"]),
            ("/", ["a", "a"], [b"a", b"a"]),
        ],
    )
    def test_right(
        self, daemon: Daemon, cwd: str, paths: list[str], expected: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(daemon.folder)
        (daemon.folder.parent / "view").symlink_to("mnt")
        monkeypatch.chdir(cwd.format(mnt=daemon.folder))
        mountpoint = str(daemon.folder.parent / "view")
        assert main.run(["warm", mountpoint, *(path.format(mnt=daemon.folder) for path in paths)]) == 0
        assert sorted(daemon.asked()) == expected

    @pytest.mark.parametrize(
        ("path", "sentence"),
        [
            ("nosuch", "{mnt}/nosuch does not exist: name files and directories in the mount"),
            ("a/b", "{mnt}/a/b does not exist: name files and directories in the mount"),
            ("/etc/passwd", "/etc/passwd is not in the mount {mnt}: name files and directories in it"),
            ("d/out", "d/out is not in the mount {mnt}: name files and directories in it"),
            ("..", ".. is not in the mount {mnt}: name files and directories in it"),
            ("{mnt}x", "{mnt}x is not in the mount {mnt}: name files and directories in it"),
            ("\udcff", "{mnt}/\\udcff does not exist: name files and directories in the mount"),
        ],
    )
    def test_wrong(
        self,
        daemon: Daemon,
        path: str,
        sentence: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """One that is wrong, and nothing is copied."""
        fill(daemon.folder)
        monkeypatch.chdir("/")
        mnt = str(daemon.folder)
        assert main.run(["warm", mnt, "a", path.format(mnt=mnt)]) == 11
        assert capsys.readouterr() == ("", f"dmfs: {sentence.format(mnt=mnt)}\n")
        assert daemon.batches == []

    def test_wrong_mountpoints(self, daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)
        mnt = daemon.folder
        assert main.run(["warm", str(tmp_path), "a"]) == 8
        assert main.run(["warm", f"{mnt}/d", "b"]) == 8
        daemon.stop()
        assert main.run(["warm", str(mnt), "a"]) == 8
        assert capsys.readouterr().err.splitlines() == [
            f"dmfs: {tmp_path} is not mounted by dmfs: dmfs status lists the mounts of this user",
            f"dmfs: {mnt}/d is inside the mount {mnt}: give that as MOUNTPOINT",
            f"dmfs: {mnt} is a mount of dmfs, but no daemon of this user serves it: unmount it with: dmfs umount {mnt}",
        ]

    def test_mount_that_is_about_to_end(
        self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(mounting, "find_mount", lambda path: None)
        assert main.run(["warm", str(daemon.folder), "."]) == 8
        assert "is not mounted any more: its daemon is about to end" in capsys.readouterr().err


class TestWalk:
    def find(self, folder: Path) -> Iterator[walk.Seen]:
        return walk.walk(str(folder), folder.stat().st_dev, (str(folder),))

    def test_kinds_and_sizes(self, folder: Path) -> None:
        fill(folder)
        assert sorted(self.find(folder)) == [
            ("file", "a", 1, ""),
            ("file", "d/b", 2, ""),
            ("file", "d/e/c", 3, ""),
            ("file", "empty", 0, ""),
            ("skipped", "d/e/pipe", 0, ""),
            ("skipped", "d/out", 0, ""),
            ("skipped", "link", 0, ""),
        ]
        assert list(walk.count(str(folder), folder.stat().st_dev, (str(folder), str(folder)))) == [(8, 12, True)]

    def test_order_of_the_directories(self, folder: Path) -> None:
        for number in range(100):
            (folder / f"{number:03}").mkdir()
            (folder / f"{number:03}/x").touch()
        assert [seen.path for seen in self.find(folder)] == [f"{name}/x" for name in os.listdir(folder)]

    def test_other_mounts_are_skipped(self, folder: Path) -> None:
        fill(folder)
        assert [seen.kind for seen in walk.walk(str(folder), 1, (str(folder),))] == ["skipped"]

    def test_what_is_removed_meanwhile_is_no_failure(self, folder: Path) -> None:
        for number in range(10):
            (folder / f"{number}").touch()
        found = self.find(folder)
        first = next(found)
        for path in folder.iterdir():
            path.unlink()
        assert [first, *found] == [first]

    def test_what_cannot_be_looked_at_is_named(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(folder)
        lstat, scandir = os.lstat, os.scandir

        def failing(path: str) -> Any:
            if path.endswith("/a"):
                raise OSError(errno.EIO, "Input/output error")
            return lstat(path)

        def refusing(path: str) -> Any:
            if path.endswith("/e"):
                raise OSError(errno.EACCES, "Permission denied", path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refusing)
        monkeypatch.setattr(os, "lstat", failing)
        assert sorted(seen for seen in self.find(folder) if seen.kind != "skipped") == [
            ("failed", "a", 0, "Input/output error"),
            ("failed", "d/e", 0, "Permission denied"),
            ("file", "d/b", 2, ""),
            ("file", "empty", 0, ""),
        ]

    @pytest.mark.parametrize("call", ["lstat", "scandir"])
    def test_dead_mount(self, folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        device = folder.stat().st_dev

        def dead(path: str) -> Any:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

        monkeypatch.setattr(os, call, dead)
        with pytest.raises(DaemonUnresponsive, match=f"the daemon of {folder} is gone: mount again"):
            list(walk.walk(str(folder), device, (str(folder),)))


class TestBatches:
    def test_many_files(self, daemon: Daemon) -> None:
        for number in range(600):
            (daemon.folder / f"{number:03}").touch()
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 0
        assert max(len(paths) for paths, _, _ in daemon.batches) <= 256
        assert sorted(daemon.asked()) == [b"%03d" % number for number in range(600)]

    def test_large_files(self, daemon: Daemon) -> None:
        for number in range(5):
            with (daemon.folder / str(number)).open("wb") as file:
                file.truncate(200 * MiB)
        assert main.run(["warm", str(daemon.folder), str(daemon.folder), "--push"]) == 0
        assert max(len(paths) for paths, _, _ in daemon.batches) <= 2
        pushed = [before // MiB for _, _, before in daemon.batches]
        assert pushed == [200 * sum(len(paths) for paths, _, _ in daemon.batches[:at]) for at in range(len(pushed))]

    def test_undecodable_and_long_names(self, daemon: Daemon) -> None:
        """Each byte takes six in the request."""
        deep = os.fsencode(daemon.folder)
        for _ in range(8):
            deep = os.path.join(deep, b"\xff" * 250)
            os.mkdir(deep)
        names = [b"\xfe\n%02d" % number + b"\xff" * 240 for number in range(50)]
        for name in names:
            os.close(os.open(os.path.join(deep, name), os.O_CREAT))
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 0
        below = deep[len(os.fsencode(daemon.folder)) + 1 :]
        assert sorted(daemon.asked()) == [os.path.join(below, name) for name in names]

    def test_slow_finds_do_not_wait_for_a_full_batch(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = daemon.folder.parent / "gate"
        os.mkfifo(gate)

        def slow(*where: object) -> Iterator[walk.Seen]:
            yield walk.Seen("file", "a")
            gate.read_text()  # until the first batch is there
            yield walk.Seen("file", "b")

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            if paths == [b"a"]:
                gate.write_text("")

        monkeypatch.setattr(warm, "walk", slow)
        daemon.work = work
        assert main.run(["warm", str(daemon.folder), "."]) == 0
        assert daemon.asked() == [b"a", b"b"]
        assert len(daemon.batches) == 2


class TestOutcome:
    def test_well(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            await daemon.all_there(paths, progress)
            progress.fetched = 1

        daemon.work = work
        assert main.run(["warm", str(daemon.folder), str(daemon.folder), "--push"]) == 0
        assert capsys.readouterr() == (
            "4 files (6 B) are in the cache: 1 copied now, 3 there before; 3 pushed into memory.\n"
            "Skipped as no files: 3 (symbolic links, devices, other mounts).\n",
            "",
        )
        assert main.run(["warm", str(daemon.folder), "a"]) == 0
        assert capsys.readouterr().out == "1 file (1 B) is in the cache: 1 copied now, 0 there before.\n"

    def test_nothing(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 0
        assert capsys.readouterr() == ("There are no files.\n", "")
        assert daemon.batches == []

    def test_what_does_not_fit_is_said(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            progress.files, progress.bytes, progress.no_room, progress.no_memory = 3, 3 << 30, 1, 1

        daemon.work = work
        assert main.run(["warm", str(daemon.folder), str(daemon.folder), "--push"]) == 0
        assert capsys.readouterr().out.splitlines()[:4] == [
            "3 files (3.0 GiB) are in the cache: 0 copied now, 3 there before; 0 pushed into memory.",
            "No room in the cache for 1 file, to be read from the source: mount with more (--cache PATH:SIZE).",
            "Not pushed for want of free memory: 1 file.",
            "Not pushed, being read just then or dropped by the kernel meanwhile: 1 file.",
        ]

    def test_failures(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        for number in range(20):
            (daemon.folder / f"{number:02}").touch()

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            progress.failures = len(paths)
            progress.failed += [(os.fsdecode(path) + "\udcff\n", "Input/output error") for path in sorted(paths)]

        daemon.work = work
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 1
        out, err = capsys.readouterr()
        assert out == "Not to be had from the source: 20; --json names up to 1,000.\n"
        assert err.splitlines() == [f"dmfs: {number:02}\\udcff\\n: Input/output error" for number in range(8)]
        assert main.run(["warm", str(daemon.folder), str(daemon.folder), "--json"]) == 1
        out, err = capsys.readouterr()
        assert err == ""
        answer = json.loads(out)
        assert answer["failures"] == 20
        assert answer["failed"][3] == {"path": "03\udcff\n", "reason": "Input/output error"}

    def test_json(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)
        assert main.run(["warm", str(daemon.folder), str(daemon.folder), "--push", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "files": 4,
            "bytes": 6,
            "fetched": 0,
            "fetched_bytes": 0,
            "pushed": 3,
            "pushed_bytes": 6,
            "no_room": 0,
            "no_memory": 0,
            "skipped": 3,
            "failures": 0,
            "failed": [],
        }

    def test_refusal_of_the_daemon(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            raise ConfigError("nothing can be pushed here: warm without --push")

        daemon.work = work
        assert main.run(["warm", str(daemon.folder), "a", "--push"]) == 3
        assert capsys.readouterr() == ("", "dmfs: nothing can be pushed here: warm without --push\n")

    def test_bar(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        for number in range(300):
            (daemon.folder / f"{number:03}").write_bytes(b"x" * 1000)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 0
        lines = terminal.getvalue().split("\r")
        assert any("256/300 files, 250.0 KiB/293.0 KiB" in line for line in lines)
        assert lines[-1].endswith("\x1b[2K")  # nothing of it is left
        assert capsys.readouterr().out == "300 files (293.0 KiB) are in the cache: 0 copied now, 300 there before.\n"


class TestTrouble:
    async def hang(self, paths: list[bytes], progress: WarmProgress) -> None:
        await trio.sleep_forever()

    def test_ctrl_c_cancels_what_the_daemon_does(self, daemon: Daemon) -> None:
        fill(daemon.folder)

        async def work(paths: list[bytes], progress: WarmProgress) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await trio.sleep_forever()

        daemon.work = work
        assert main.run(["warm", str(daemon.folder), str(daemon.folder)]) == 130
        assert daemon.is_cancelled.wait(5)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_daemon_that_ends(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        fill(daemon.folder)
        daemon.work = self.hang
        ender = threading.Thread(target=lambda: (wait_until(lambda: daemon.batches, 5, "it is asked"), daemon.stop()))
        ender.start()
        assert main.run(["warm", str(daemon.folder), "a"]) == 10
        ender.join(10)
        who = f"the daemon of {daemon.folder} (pid {os.getpid()})"
        assert capsys.readouterr().err == f"dmfs: {who} has ended, or has too many clients: see dmfs status\n"

    def test_source_that_hangs_is_waited_for(
        self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gate = daemon.folder.parent / "gate"
        os.mkfifo(gate)
        asked = 0

        def slow(*where: object) -> Iterator[walk.Seen]:
            gate.read_text()
            yield walk.Seen("file", "a")

        def ask(*arguments: object, **options: object) -> None:
            nonlocal asked
            asked += 1
            if asked == 4:
                gate.write_text("")

        (daemon.folder / "a").touch()
        monkeypatch.setattr(warm, "walk", slow)
        monkeypatch.setattr(warm, "PATIENCE", 0.02)
        monkeypatch.setattr(warm.client, "ask", ask)
        assert main.run(["warm", str(daemon.folder), "."]) == 0
        assert asked >= 4
        assert capsys.readouterr().err == (
            f"dmfs: waiting for the source: dmfs status {daemon.folder} says for which answers\n"
        )

    def test_hung_daemon_is_not_waited_for(
        self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It hangs from the beginning, or while files are looked for."""

        def ask(*arguments: object, **options: object) -> None:
            if next(answers, None) is None:
                raise DaemonUnresponsive("it did not answer")

        monkeypatch.setattr(warm, "walk", lambda *where: iter(threading.Event().wait, None))
        monkeypatch.setattr(warm, "PATIENCE", 0.02)
        monkeypatch.setattr(warm.client, "ask", ask)
        for known in ([], ["well"]):
            answers = iter(known)
            assert main.run(["warm", str(daemon.folder), "."]) == 10
            assert capsys.readouterr().err == "dmfs: it did not answer\n"
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
