"""`dmfs mount` up to the mount itself: every check with its sentence, the dry run, and the start of the daemon."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dmfs
from dmfs import disks, privileges, runtime
from dmfs.cli import checks, launch, main
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
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


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
        with pytest.raises(SourceError, match=r"cannot be read: File name too long$"):
            tree.check(source="/" + "x" * 300)

        def refused(path: str) -> str:
            raise PermissionError

        monkeypatch.setattr(checks, "_list_one", refused)
        with pytest.raises(SourceError, match=r"may not be read by this user: ask its owner for r-x permission$"):
            tree.check()

    def test_source_that_hangs(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "SOURCE_TIMEOUT", 0.05)
        monkeypatch.setattr(checks, "_list_one", lambda path: time.sleep(60))
        with pytest.raises(SourceError, match=r"did not answer within 0 s: is its file system up\?$"):
            tree.check()

    def test_mountpoint(self, tree: Tree) -> None:
        with pytest.raises(MountpointError, match=r"/new one does not exist: make it with: mkdir -p '.*/new one'$"):
            tree.check(mountpoint=f"{tree.base}/new one")
        (tree.base / "file").touch()
        with pytest.raises(MountpointError, match=r"/file is not a directory: mount on an empty directory$"):
            tree.check(mountpoint=f"{tree.base}/file")
        (tree.mnt / "file").touch()
        with pytest.raises(
            MountpointError, match=r"is not empty, and a mount would hide what is in it: mount on an empty"
        ):
            tree.check()

    def test_mountpoint_that_hangs(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "LOOK_TIMEOUT", 0.2)
        monkeypatch.setattr(checks, "_unfit_mountpoint", lambda path: time.sleep(60))
        with pytest.raises(MountpointError, match=r"did not answer within"):
            tree.check()
        monkeypatch.setattr(checks, "real_mountpoint", lambda path: time.sleep(60))
        with pytest.raises(MountpointError, match=r"does not answer: is it inside a mount that hangs\?$"):
            tree.check()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_not_writable(self, tree: Tree) -> None:
        tree.mnt.chmod(0o500)
        with pytest.raises(MountpointError, match=r"is not writable by this user, which fusermount3 asks for"):
            tree.check()
        tree.mnt.chmod(0o700)
        tree.cache.chmod(0o500)
        with pytest.raises(CacheError, match=r"/cache is not writable by this user$"):
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
        with pytest.raises(
            MountpointError, match=r"^the mountpoint .*/mnt is inside the cache .*: mount on a directory"
        ):
            tree.check(cache=[{"path": str(tree.base)}])

    def test_caches(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree.base / "file").touch()
        with pytest.raises(CacheError, match=r"/file is not a directory$"):
            tree.check(cache=[{"path": f"{tree.base}/file"}])
        with pytest.raises(CacheError, match=r"/file/a cannot be made: .*/file is not a directory$"):
            tree.check(cache=[{"path": f"{tree.base}/file/a"}])
        (tree.base / "same").symlink_to(tree.cache)
        with pytest.raises(CacheError, match=r"/cache is named twice: name each folder once$"):
            tree.check(cache=[{"path": str(tree.cache)}, {"path": f"{tree.base}/same"}])
        monkeypatch.setattr(checks.disks, "is_network_file_system", lambda path: "Lustre")
        [note] = tree.check().notes
        assert note.startswith(f"warning: the cache {tree.cache} is on Lustre, a network file system; ")

    def test_default_cache(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks.disks, "file_system", lambda path: checks.disks.FileSystem("ext4", "disk"))
        checked = tree.check(cache=(), environ={"TMPDIR": str(tree.cache)})
        assert checked.is_default_cache
        assert checked.config.cache[0].path == f"{tree.cache}/dmfs"
        with pytest.raises(CacheError, match=r"^no cache is given"):
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
            MountpointError, match=r"cannot be unmounted: Operation not permitted; try as root: umount -l "
        ):
            tree.check()

    def test_log_file(self, tree: Tree) -> None:
        with pytest.raises(ConfigError, match=r"is a directory: name a file$"):
            tree.check(log_file=str(tree.base))
        with pytest.raises(ConfigError, match=r"/a/log cannot be written: .*/a is not a directory$"):
            tree.check(log_file=f"{tree.base}/a/log")
        tree.check(log_file=f"{tree.base}/log")
        assert not (tree.base / "log").exists()

    def test_front_end_that_is_not_installed(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FuseUnavailable, match=r"^the package pyfuse3 is not installed: install dmfs\[pyfuse3\]"):
            tree.check(front_end="pyfuse3")

    def test_mode_that_the_front_end_has_not(self, tree: Tree) -> None:
        with pytest.raises(ConfigError, match=r"^the front end pyfuse3 has no passthrough mode: leave out --io"):
            tree.check(front_end="pyfuse3", io="passthrough")

    @pytest.mark.parametrize(("most", "default", "told"), [(0, 0, 0), (600, 0, 600), (0, 60, 60), (600, 60, 60)])
    def test_kernel_that_ends_mounts_for_one_late_answer(
        self, tree: Tree, monkeypatch: pytest.MonkeyPatch, most: int, default: int, told: int
    ) -> None:
        for name, value in (("max_request_timeout", most), ("default_request_timeout", default)):
            (tree.base / name).write_text(f"{value}\n")
        monkeypatch.setattr(mounting, "SYSCTL", str(tree.base))
        warnings = [note for note in tree.check().notes if "ends a FUSE mount" in note]
        assert [f" {told} s," in warning for warning in warnings] == [True] * bool(told)

    def test_no_fuse(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(*, allow_other: bool) -> None:
            raise FuseUnavailable("no FUSE")

        monkeypatch.setattr(mounting, "check_available", missing)
        with pytest.raises(FuseUnavailable, match=r"^no FUSE$"):
            tree.check()


class TestRuntimeDirectory:
    def test_is_no_cache(self, tree: Tree) -> None:
        """Daemons hold a lock on it, so that a tier there would wait for itself."""
        path = runtime.runtime_dir()
        with pytest.raises(CacheError, match=f"^the cache {path} is the runtime directory of dmfs: give a folder"):
            tree.check(cache=[{"path": path}])

    @pytest.mark.skipif(disks.file_system("/tmp").kind != "disk", reason="/tmp is not on a disk")
    def test_is_not_the_default_cache(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        cache = tree.check(cache=[], environ={"TMPDIR": "/tmp"}).config.cache[0].path
        assert cache == "/tmp/dmfs-cache-12345"
        assert cache not in runtime.folders()


class TestFuseChecks:
    @pytest.fixture(autouse=True)
    def _device(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "fuse").touch()
        monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "fuse"))
        monkeypatch.setattr(mounting, "_STANDARD_PATH", "")
        monkeypatch.setattr(mounting, "FUSE_CONF", str(tmp_path / "fuse.conf"))

    def test_no_device(self, tmp_path: Path) -> None:
        (tmp_path / "fuse").unlink()
        with pytest.raises(FuseUnavailable, match=r"fuse cannot be opened"):
            mounting.check_available(allow_other=False)

    def test_as_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(privileges, "has_sys_admin", lambda: True)
        monkeypatch.setenv("PATH", "")
        mounting.check_available(allow_other=True)

    def test_as_a_user(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(privileges, "has_sys_admin", lambda: False)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(FuseUnavailable, match=r"^fusermount3 is not installed: install the package fuse3"):
            mounting.check_available(allow_other=False)
        helper = tmp_path / "fusermount3"
        helper.touch(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        mounting.check_available(allow_other=False)
        with pytest.raises(FuseUnavailable, match=r"user_allow_other"):
            mounting.check_available(allow_other=True)
        (tmp_path / "fuse.conf").write_text("# user_allow_other\n")
        with pytest.raises(FuseUnavailable, match=r"user_allow_other"):
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


# Stands in for the interpreter that launch.py starts: its arguments are -m dmfs.daemon --config-fd N --ready-fd M.
PYTHON = sys.executable
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
            script.write_text(FAKE_DAEMON.format(python=PYTHON, body=body))
            script.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(script))
            return launch.start(
                MountConfig.model_validate({"source": "/s", "mountpoint": "/mnt/dm", **settings}), os.environ
            )

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
        with pytest.raises(UserError, match=r"^the cache is taken$") as said:
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
        with pytest.raises(UserError, match=r"^the daemon was killed by signal 9 before the mount was ready"):
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
        with pytest.raises(ConfigError, match=r"cannot be opened: Is a directory$"):
            start("", log_file=str(tmp_path))
