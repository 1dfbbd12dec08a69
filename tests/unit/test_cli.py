"""The command line without a mount: sentences and exit codes, help texts, what is loaded, status, the starting and ending of daemons."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import dmfs
from dmfs import runtime
from dmfs.cli import bounded, checks, launch, main, output, paths, umount
from dmfs.config import MountConfig
from dmfs.errors import (
    CacheError,
    ConfigError,
    DaemonUnresponsive,
    FuseUnavailable,
    MountpointError,
    SourceError,
    UserError,
)
from dmfs.fuse import mounting

# bounded.call forks; here other tests may have left idle threads, in the command line there are none.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def dmfs_process(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dmfs", *arguments], capture_output=True, text=True, timeout=30, check=False, **options
    )


class TestOutput:
    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1 << 20, "1.0 MiB"),
            (1 << 60, "1024.0 PiB"),
        ],
    )
    def test_amount(self, size: int, text: str) -> None:
        assert output.amount(size) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(-1, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
    )
    def test_duration(self, seconds: float, text: str) -> None:
        assert output.duration(seconds) == text

    def test_names_stay_on_their_line(self) -> None:
        assert output.printable("/a b/ä\n\x1b[31m\udcff") == "/a b/ä\\n\\x1b[31m\\udcff"


class TestPaths:
    def test_links_and_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "real/mnt").mkdir(parents=True)
        (tmp_path / "link").symlink_to("real")
        (tmp_path / "real/to").symlink_to("../link/mnt")
        (tmp_path / "loop").symlink_to("loop")
        monkeypatch.chdir(tmp_path / "real")
        real = str(tmp_path / "real/mnt")
        for path in ("mnt", "./mnt/", "to", "../link/to", f"{tmp_path}/link/mnt", real):
            assert paths.real_mountpoint(path) == real, path
        assert paths.real_mountpoint("missing/too") == str(tmp_path / "real/missing/too")
        assert paths.real_mountpoint("/") == "/"
        assert paths.real_mountpoint(f"{tmp_path}/loop") == str(tmp_path / "loop")

    def test_is_inside(self) -> None:
        assert paths.is_inside("/a/b", "/a")
        assert paths.is_inside("/a", "/a")
        assert paths.is_inside("/a", "/")
        assert not paths.is_inside("/ab", "/a")
        assert not paths.is_inside("/a", "/a/b")


class TestBounded:
    def test_results_and_errors_come_through(self) -> None:
        assert bounded.call(10, os.path.join, "a" * 100_000, "b") == "a" * 100_000 + "/b"
        with pytest.raises(FileNotFoundError) as missing:
            bounded.call(10, os.stat, "/nowhere")
        assert missing.value.filename == "/nowhere"
        with pytest.raises(ZeroDivisionError):
            bounded.call(10, divmod, 1, 0)

    def test_what_hangs_is_killed(self) -> None:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            bounded.call(0.05, time.sleep, 60)
        assert time.monotonic() - start < 5
        pid, status = os.waitpid(-1, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL

    def test_what_dies_is_an_error(self) -> None:
        with pytest.raises(OSError, match="the process that looked died"):
            bounded.call(10, os._exit, 1)

    def test_child_holds_no_pipe_of_ours(self) -> None:
        """One that hangs for good must not keep somebody waiting for the end of our output."""
        read, write = os.pipe()
        with pytest.raises(TimeoutError):
            bounded.call(0.05, time.sleep, 60)
        os.close(write)
        assert os.read(read, 1) == b""
        os.close(read)
        os.waitpid(-1, 0)


def command_of(name: str | None) -> click.Command:
    if name is None:
        return main.cli
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    return command


class TestMain:
    @pytest.mark.parametrize("name", [None, "mount", "umount", "status"])
    def test_help_has_examples_and_fits(self, name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run([*([name] if name else []), "--help"]) == 0
        text = capsys.readouterr().out
        assert "\n  Examples:\n" in text
        assert f"    dmfs {name or 'mount'} " in text
        assert [line for line in text.splitlines() if len(line) > 80] == []

    def test_help_lists_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        main.run(["-h"])
        text = capsys.readouterr().out
        for name in main.cli.list_commands(click.Context(main.cli)):
            assert f"\n  {name} " in text
            assert command_of(name).name == name

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["--version"]) == 0
        assert capsys.readouterr().out == f"dmfs {dmfs.__version__}\n"

    @pytest.mark.parametrize("arguments", [["nosuch"], ["mount", "--nosuch"], ["mount", "/only-one"], ["umount"]])
    def test_wrong_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(arguments) == 2
        assert "Usage: dmfs" in capsys.readouterr().err

    def test_mistakes_are_sentences(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["umount", "/no\nwhere"]) == 8
        captured = capsys.readouterr()
        assert captured.err == "dmfs: /no\\nwhere is not a mountpoint: dmfs status lists the mounts of this user\n"
        assert captured.out == ""

    @pytest.mark.parametrize("exc", [KeyboardInterrupt, click.Abort])
    def test_interrupted(
        self, exc: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted() -> None:
            raise exc

        monkeypatch.setattr(runtime, "records", interrupted)
        assert main.run(["status"]) == 130
        assert capsys.readouterr() == ("", "")

    @pytest.mark.slow
    def test_broken_pipe_is_quiet(self) -> None:
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as closed:
            done = subprocess.run(
                [sys.executable, "-m", "dmfs", "status"], stdout=closed, stderr=subprocess.PIPE, timeout=30, check=False
            )
        assert (done.returncode, done.stderr) == (141, b"")

    @pytest.mark.slow
    @pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["umount", "/nowhere"], ["--help"]])
    def test_light_commands_load_nothing_heavy(self, arguments: list[str]) -> None:
        code = (
            "import sys; from dmfs.cli.main import run; run(sys.argv[1:]); "
            "print(*{'trio', 'pydantic', 'msgpack', 'yaml', 'rich', 'asyncio'} & set(sys.modules), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stderr.splitlines()[-1] == ""


class Tree:
    """A source, a mountpoint and a cache, all in order."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("source", "mnt", "cache"):
            (base / name).mkdir()
            setattr(self, name, base / name)

    source: Path
    mnt: Path
    cache: Path

    def check(self, *, mend: bool = True, environ: dict[str, str] | None = None, **changes: object) -> checks.Checked:
        settings = {
            "source": str(self.source),
            "mountpoint": str(self.mnt),
            "cache": [{"path": str(self.cache), "size": "1GiB"}],
            **changes,
        }
        return checks.check(MountConfig.model_validate(settings), environ or {}, mend=mend)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(mounting, "check_available", lambda *, allow_other: None)
    return Tree(tmp_path)


class TestChecks:
    def test_all_in_order(self, tree: Tree) -> None:
        checked = tree.check()
        assert checked.notes == []
        assert not checked.is_default_cache
        assert checked.config.cache[0].path == str(tree.cache)
        assert list(tree.cache.iterdir()) == []

    def test_real_paths(self, tree: Tree) -> None:
        (tree.base / "link").symlink_to(tree.base)
        found = tree.check(
            source=f"{tree.base}/link/source/.",
            mountpoint=f"{tree.base}/link/mnt/",
            cache=[{"path": f"{tree.base}/link/cache/new/one"}],
        ).config
        assert found.source == str(tree.source)
        assert found.mountpoint == str(tree.mnt)
        assert found.cache[0].path == str(tree.cache / "new/one")

    def test_odd_names(self, tree: Tree) -> None:
        odd = tree.base / "a b,c\n'd"
        odd.mkdir()
        assert tree.check(mountpoint=str(odd)).config.mountpoint == str(odd)

    def test_source(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            SourceError, match=r"^the source /nowhere does not exist: is its file system mounted on this node\?$"
        ):
            tree.check(source="/nowhere")
        (tree.base / "file").touch()
        with pytest.raises(SourceError, match=r"/file is not a directory: name the directory that holds the dataset$"):
            tree.check(source=f"{tree.base}/file")
        with pytest.raises(SourceError, match="cannot be read: File name too long$"):
            tree.check(source="/" + "x" * 300)

        def refused(path: str) -> str:
            raise PermissionError

        monkeypatch.setattr(checks, "_list_one", refused)
        with pytest.raises(SourceError, match="may not be read by this user: ask its owner for r-x permission$"):
            tree.check()

    def test_source_that_hangs(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "SOURCE_TIMEOUT", 0.05)
        monkeypatch.setattr(checks, "_list_one", lambda path: time.sleep(60))
        with pytest.raises(SourceError, match=r"did not answer within 0 s: is its file system up\?$"):
            tree.check()
        os.waitpid(-1, 0)

    def test_mountpoint(self, tree: Tree) -> None:
        with pytest.raises(MountpointError, match=r"/new one does not exist: make it with: mkdir -p '.*/new one'$"):
            tree.check(mountpoint=f"{tree.base}/new one")
        (tree.base / "file").touch()
        with pytest.raises(MountpointError, match=r"/file is not a directory: mount on an empty directory$"):
            tree.check(mountpoint=f"{tree.base}/file")
        (tree.mnt / "file").touch()
        with pytest.raises(
            MountpointError, match="is not empty, and a mount would hide what is in it: mount on an empty"
        ):
            tree.check()

    def test_mountpoint_that_hangs(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "LOOK_TIMEOUT", 0.2)
        monkeypatch.setattr(checks, "_unfit_mountpoint", lambda path: time.sleep(60))
        with pytest.raises(MountpointError, match="did not answer within"):
            tree.check()
        os.waitpid(-1, 0)
        monkeypatch.setattr(checks, "real_mountpoint", lambda path: time.sleep(60))
        with pytest.raises(MountpointError, match=r"does not answer: is it inside a mount that hangs\?$"):
            tree.check()
        os.waitpid(-1, 0)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_not_writable(self, tree: Tree) -> None:
        tree.mnt.chmod(0o500)
        with pytest.raises(MountpointError, match="is not writable by this user, which fusermount3 asks for"):
            tree.check()
        tree.mnt.chmod(0o700)
        tree.cache.chmod(0o500)
        with pytest.raises(CacheError, match="/cache is not writable by this user$"):
            tree.check()
        with pytest.raises(CacheError, match=r"/cache/a/b cannot be made: .*/cache is not writable$"):
            tree.check(cache=[{"path": f"{tree.cache}/a/b"}])

    def test_overlaps(self, tree: Tree) -> None:
        with pytest.raises(
            MountpointError, match=r"^the source and the mountpoint are both .*: mount on another, empty"
        ):
            tree.check(mountpoint=str(tree.source))
        (tree.source / "in").mkdir()
        with pytest.raises(
            MountpointError, match=r"/source/in is inside the source .*/source: mount on a directory outside"
        ):
            tree.check(mountpoint=f"{tree.source}/in")
        with pytest.raises(MountpointError, match=r"/source is inside the mountpoint .*, which would hide it$"):
            tree.check(mountpoint=str(tree.base))
        for cache in ("", "/below"):
            with pytest.raises(MountpointError, match=r"^the cache .* is inside the mountpoint .*: put it elsewhere$"):
                tree.check(cache=[{"path": f"{tree.mnt}{cache}"}])
            with pytest.raises(CacheError, match=r"^the cache .* is inside the source .*: put it on a local disk$"):
                tree.check(cache=[{"path": f"{tree.source}{cache}"}])

    def test_caches(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree.base / "file").touch()
        with pytest.raises(CacheError, match="/file is not a directory$"):
            tree.check(cache=[{"path": f"{tree.base}/file"}])
        with pytest.raises(CacheError, match=r"/file/a cannot be made: .*/file is not a directory$"):
            tree.check(cache=[{"path": f"{tree.base}/file/a"}])
        (tree.base / "same").symlink_to(tree.cache)
        with pytest.raises(CacheError, match="/cache is named twice: name each folder once$"):
            tree.check(cache=[{"path": str(tree.cache)}, {"path": f"{tree.base}/same"}])
        monkeypatch.setattr(checks.disks, "is_network_file_system", lambda path: "Lustre")
        [note] = tree.check().notes
        assert note.startswith(f"warning: the cache {tree.cache} is on Lustre, a network file system; ")

    def test_default_cache(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks.disks, "file_system", lambda path: checks.disks.FileSystem("ext4", "disk"))
        checked = tree.check(cache=(), environ={"TMPDIR": str(tree.cache)})
        assert checked.is_default_cache
        assert checked.config.cache[0].path == f"{tree.cache}/dmfs"
        with pytest.raises(CacheError, match="^no cache is given"):
            tree.check(cache=())

    def test_mounted_by_us(self, tree: Tree) -> None:
        lock = runtime.acquire(str(tree.mnt), runtime.MountRecord(str(tree.mnt), "/s", os.getpid(), time.time()))
        with pytest.raises(
            MountpointError, match=rf"already mounted .* by dmfs with pid {os.getpid()}; unmount it first"
        ):
            tree.check()
        lock.release()

    def test_mounted_by_others(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        table = mounting.MountInfo(1, 0, "0:42", str(tree.mnt), "nfs4", "server:/data")
        monkeypatch.setattr(mounting, "find_mount", lambda path: table)
        with pytest.raises(
            MountpointError, match=r"is already a mountpoint, of server:/data \(nfs4\): mount on an empty"
        ):
            tree.check()

    @pytest.mark.parametrize("mend", [True, False])
    def test_dead_mount_of_our_own(self, tree: Tree, monkeypatch: pytest.MonkeyPatch, mend: bool) -> None:
        table = [mounting.MountInfo(number, 0, "0:42", str(tree.mnt), "fuse.dmfs", "dmfs:/s") for number in (1, 2)]
        monkeypatch.setattr(mounting, "find_mount", lambda path: table[-1] if table else None)
        monkeypatch.setattr(mounting, "is_dead", lambda path: True)
        monkeypatch.setattr(mounting, "unmount", lambda path, *, lazy: table.pop())
        notes = tree.check(mend=mend).notes
        if mend:
            assert notes == [f"the dead mount at {tree.mnt} (its daemon is gone) was unmounted first"] * 2
        else:
            assert notes == [f"the dead mount at {tree.mnt} would be unmounted first"]
        assert len(table) == (0 if mend else 2)

    def test_dead_mount_that_stays(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: str, *, lazy: bool) -> None:
            raise PermissionError(1, "Operation not permitted")

        table = mounting.MountInfo(1, 0, "0:42", str(tree.mnt), "fuse.dmfs", "dmfs:/s")
        monkeypatch.setattr(mounting, "find_mount", lambda path: table)
        monkeypatch.setattr(mounting, "is_dead", lambda path: True)
        monkeypatch.setattr(mounting, "unmount", refuse)
        with pytest.raises(
            MountpointError, match="cannot be unmounted: Operation not permitted; try as root: umount -l "
        ):
            tree.check()

    def test_log_file(self, tree: Tree) -> None:
        with pytest.raises(ConfigError, match="is a directory: name a file$"):
            tree.check(log_file=str(tree.base))
        with pytest.raises(ConfigError, match=r"/a/log cannot be written: .*/a is not a directory$"):
            tree.check(log_file=f"{tree.base}/a/log")
        tree.check(log_file=f"{tree.base}/log")
        assert not (tree.base / "log").exists()

    def test_front_end_that_is_not_installed(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FuseUnavailable, match=r"^the package pyfuse3 is not installed: install dmfs\[pyfuse3\]"):
            tree.check(front_end="pyfuse3")

    def test_no_fuse(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(*, allow_other: bool) -> None:
            raise FuseUnavailable("no FUSE")

        monkeypatch.setattr(mounting, "check_available", missing)
        with pytest.raises(FuseUnavailable, match="^no FUSE$"):
            tree.check()


class TestFuseChecks:
    @pytest.fixture(autouse=True)
    def _device(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "fuse").touch()
        monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "fuse"))
        monkeypatch.setattr(mounting, "_STANDARD_PATH", "")
        monkeypatch.setattr(mounting, "FUSE_CONF", str(tmp_path / "fuse.conf"))

    def test_no_device(self, tmp_path: Path) -> None:
        (tmp_path / "fuse").unlink()
        with pytest.raises(FuseUnavailable, match="fuse cannot be opened"):
            mounting.check_available(allow_other=False)

    def test_as_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", "")
        mounting.check_available(allow_other=True)

    def test_as_a_user(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(FuseUnavailable, match="^fusermount3 is not installed: install the package fuse3"):
            mounting.check_available(allow_other=False)
        helper = tmp_path / "fusermount3"
        helper.touch(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        mounting.check_available(allow_other=False)
        with pytest.raises(FuseUnavailable, match="user_allow_other"):
            mounting.check_available(allow_other=True)
        (tmp_path / "fuse.conf").write_text("# user_allow_other\n")
        with pytest.raises(FuseUnavailable, match="user_allow_other"):
            mounting.check_available(allow_other=True)
        (tmp_path / "fuse.conf").write_text(" user_allow_other \n")
        mounting.check_available(allow_other=True)


class TestDryRun:
    def test_plan(self, tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        (tree.base / "dmfs.yaml").write_text("fills: 4\nmin_free: 5%\ncache: [cache:10%]\n")
        monkeypatch.setenv("DMFS_METADATA_TTL", "60")
        arguments = [f"{tree.base}/source", f"{tree.base}/mnt", "--immutable", "--config", f"{tree.base}/dmfs.yaml"]
        assert main.run(["mount", "--dry-run", *arguments]) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert lines[:3] == ["dmfs would mount", f"  source         {tree.source}", f"  mountpoint     {tree.mnt}"]
        assert lines[3].startswith(f"  cache          {tree.cache}, ")
        assert [line.split() for line in lines[4:8]] == [
            ["with", "these", "settings"],
            ["immutable", "True", "(--immutable)"],
            ["metadata_ttl", "60.0", "(DMFS_METADATA_TTL)"],
            ["fills", "4", f"({tree.base}/dmfs.yaml", "line", "1)"],
        ]
        assert lines[8:] == ["Everything is in order. Nothing has been mounted."]
        assert captured.err == ""
        assert runtime.records() == []

    def test_mistakes(self, tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["mount", "--dry-run", str(tree.source), "/nowhere"]) == 5
        assert capsys.readouterr().err.count("\n") == 1
        assert main.run(["mount", "--dry-run"]) == 3
        assert main.run(["mount", str(tree.source), str(tree.mnt), "--cache", "/a:5XB"]) == 3
        assert main.run(["mount", str(tree.source), str(tree.mnt), "--config", "/nowhere"]) == 3
        assert capsys.readouterr().err.count("\n") == 3


STATUS = {
    "mountpoint": "/mnt/dm",
    "source": {"path": "/lustre/imagenet", "opens": 1281167, "reads": 1, "bytes": 1 << 40, "stats": 1281167, "listings": 1001},
    "dataset_id": "/lustre/imagenet",
    "state": "mounted",
    "front_end": "kernel",
    "io_mode": "plain",
    "io_mode_reason": "each range that is not in the page cache is a message",
    "version": "0.1.0",
    "pid": 12345,
    "uptime_s": 7512.3,
    "tiers": [
        {"path": "/nvme/dmfs", "capacity_bytes": 1 << 37, "used_bytes": 1 << 36, "copies": 1281167, "state": "ok"},
        {"path": "/" + "long/" * 30, "capacity_bytes": 1, "used_bytes": 0, "copies": 0, "state": "failing: Input/output error"},
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
    """Makes daemons out of threads: lock, socket, and one answer to all; None answers nothing, as a stopped process does."""
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
            "  source     /lustre/imagenet",
            "  daemon     dmfs 0.1.0, pid 12345, up 2 h 5 min",
            "             local   3,843,501  9,843,501            4.0 TiB",
            "             source         12        120            4.0 KiB",
            "             kernel          7             at most 1.0 GiB",
            "  fills      8 active, 120 queued, 1,281,167 done, 2 failed, 1.0 TiB copied",
            "  waiting    12 s  train/\\udcff\\n0.JPEG",
            "             and 12 more, see --json",
        ):
            assert expected in lines
        assert any(line.endswith("64.0 GiB  128.0 GiB  1,281,167  ok") or "/nvme/dmfs" in line for line in lines)

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

    def test_busy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def busy(path: str, *, lazy: bool = False) -> None:
            raise OSError(16, "Device or resource busy")

        users = [mounting.Process(100 + number, "python") for number in range(10)]
        table = mounting.MountInfo(1, 0, "0:42", "/mnt/dm", "fuse.dmfs", "dmfs:/s")
        monkeypatch.chdir(tmp_path)
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


# Stands in for the interpreter that launch.py starts: its arguments are -m dmfs.daemon --config-fd N --ready-fd M.
FAKE_DAEMON = """#!{python}
import json, os, signal, sys, time
config, ready = int(sys.argv[4]), int(sys.argv[6])
settings = json.loads(open(config).read())
{body}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
class TestLaunch:
    @pytest.fixture
    def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
        def start(body: str, **settings: object) -> int:
            script = tmp_path / "python"
            script.write_text(FAKE_DAEMON.format(python=sys.executable, body=body))
            script.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(script))
            return launch.start(MountConfig.model_validate({"source": "/s", "mountpoint": "/mnt/dm", **settings}))

        return start

    def test_ready(self, start: Callable[..., int], tmp_path: Path) -> None:
        pid = start(
            f"json.dump([settings, os.getsid(0), os.getpid(), os.getcwd()], open('{tmp_path}/said', 'w'))\n"
            "os.write(ready, b'{\"ok\"'); time.sleep(0.1); os.write(ready, b': true}\\n')\nos.close(ready)\n"
            "time.sleep(60)"
        )
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        settings, session, own, folder = json.loads((tmp_path / "said").read_text())
        assert MountConfig.model_validate(settings).mountpoint == "/mnt/dm"
        assert session == own == pid
        assert folder == str(Path(dmfs.__file__).parents[1])

    def test_what_the_daemon_says(self, start: Callable[..., int]) -> None:
        with pytest.raises(UserError, match="^the cache is taken$") as said:
            start('os.write(ready, b\'{"error": "the cache is taken", "exit_code": 6}\\n\'); time.sleep(60)')
        assert said.value.exit_code == 6

    @pytest.mark.parametrize("log", [True, False])
    def test_one_that_dies(self, start: Callable[..., int], tmp_path: Path, log: bool) -> None:
        settings = {}
        if log:
            (tmp_path / "log").write_text("an older line\n")
            settings["log_file"] = f"{tmp_path}/log"
        with pytest.raises(
            UserError, match=r"^the daemon ended before .*, its last words: ValueError: odd; run with --foreg"
        ):
            start("raise ValueError('odd')", **settings)
        with pytest.raises(
            UserError, match=r"^the daemon ended before the mount was ready; run with --foreground to see more$"
        ):
            start("", **settings)
        with pytest.raises(UserError, match="^the daemon was killed by signal 9 before the mount was ready"):
            start("os.kill(os.getpid(), 9)", **settings)
        assert not log or (tmp_path / "log").read_text().startswith("an older line\nTraceback")

    def test_one_that_never_gets_ready(self, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "START_TIMEOUT", 0.5)
        with pytest.raises(DaemonUnresponsive, match=r"^the daemon \(pid \d+\) was not ready within 0 s and was ended"):
            start("time.sleep(60)")
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, 0)

    def test_interrupted_while_waiting(self, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(ready: int, pid: int) -> bytes:
            raise KeyboardInterrupt

        monkeypatch.setattr(launch, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start("time.sleep(60)")
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, 0)

    def test_log_that_cannot_be_opened(self, start: Callable[..., int], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be opened: Is a directory$"):
            start("", log_file=str(tmp_path))
