"""Mounting and unmounting for real, as root and as an ordinary user, a file system of one file served by a thread."""

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmfs.errors import FuseUnavailable, MountpointError
from dmfs.fuse import mounting
from tests.support.mounts import why_no_mounts
from tests.support.tiny_server import TinyServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or why_no_mounts() is not None, reason="needs root and /dev/fuse")

ROOT = Path(__file__).parents[2]
NOBODY = 65534
NAMES = ["dmfs:/lustre/plain", "dmfs:/a b,c\\d", "new\nline#tab\t", "caf\udce9 \\054", "ends in \\"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that ordinary users can reach; whatever is mounted below it is detached at the end."""
    path = Path(tempfile.mkdtemp(prefix="dmfs-mounting-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    for info in reversed(mounting.mounts()):
        if info.mountpoint.startswith(f"{path}/"):
            mounting.unmount(info.mountpoint, lazy=True, force=True)
    shutil.rmtree(path)


@pytest.fixture
def mountpoint(folder: Path) -> str:
    path = folder / "mnt"
    path.mkdir()
    return str(path)


def serve(mountpoint: str, fsname: str = "dmfs:/x", *, is_mute: bool = False) -> TinyServer:
    return TinyServer(mounting.mount(mountpoint, fsname=fsname, allow_other=False), is_mute=is_mute)


def as_nobody(code: str, *, mountpoint: str, drop: str = "", **names: object) -> None:
    """Run `code` in a new process that has become an ordinary user after its imports."""
    script = f"""
import encodings.idna, errno, json, os, select, sys, threading, time, traceback
from dmfs import privileges
from dmfs.errors import *
from dmfs.fuse import mounting
from tests.support.tiny_server import TinyServer
globals().update(json.loads(sys.argv[1]))
{drop or f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"}
try:
{chr(10).join("    " + line for line in code.splitlines())}
finally:
    sys.stdout.flush()
try:
    os.waitpid(-1, os.WNOHANG)
    sys.exit("a child was left behind")
except ChildProcessError:
    pass
"""
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps({"mountpoint": mountpoint, **names})],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fsname", NAMES)
def test_mount_and_unmount_as_root(mountpoint: str, fsname: str) -> None:
    server = serve(mountpoint, fsname)
    assert not os.get_inheritable(server.fd)
    assert not os.get_blocking(server.fd)

    found = mounting.find_mount(mountpoint)
    assert found is not None
    assert (found.mountpoint, found.fs_type, found.source) == (mountpoint, "fuse.dmfs", fsname)
    flags = os.statvfs(mountpoint).f_flag
    assert flags & (os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV) == os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV
    assert Path(mountpoint, "f").read_bytes() == b"x" * 4096

    mounting.unmount(mountpoint)
    assert mounting.find_mount(mountpoint) is None
    server.thread.join(10)
    assert not server.thread.is_alive()


@pytest.mark.usefixtures("open_fuse_device")
@pytest.mark.parametrize("fsname", NAMES)
def test_mount_and_unmount_as_a_user(mountpoint: str, fsname: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    as_nobody(
        """
fd = mounting.mount(mountpoint, fsname=fsname, allow_other=False)
assert not os.get_inheritable(fd) and not os.get_blocking(fd)
TinyServer(fd)
found = mounting.find_mount(mountpoint)
assert (found.fs_type, found.source) == ("fuse.dmfs", fsname), found
with open(f"/proc/self/mountinfo", errors="surrogateescape") as file:
    line, = (line for line in file if f" {mountpoint} " in line)
assert "ro,nosuid,nodev" in line and "default_permissions" in line and f"user_id={os.getuid()}" in line, line
assert os.listdir("/proc/self/fd") and open(mountpoint + "/f").read(2) == "xx"
held = os.open(mountpoint, os.O_PATH)
try:
    mounting.unmount(mountpoint)
except OSError as exc:
    assert exc.errno == errno.EBUSY, exc
else:
    raise AssertionError("unmounted while in use")
assert [user.pid for user in mounting.users_of(found)] == [os.getpid()]
os.close(held)
mounting.unmount(mountpoint)
assert mounting.find_mount(mountpoint) is None
try:
    mounting.unmount(mountpoint)
except OSError as exc:
    assert exc.errno == errno.EINVAL, exc
""",
        mountpoint=mountpoint,
        fsname=fsname,
    )


WITH_THE_CAPABILITY = f"""
privileges.become(privileges.account_of({NOBODY}, {NOBODY}))
os.environ['PATH'] = ''
mounting._STANDARD_PATH = '/nonexistent'  # no fusermount3
"""


def test_mount_and_unmount_with_the_capability_alone(mountpoint: str) -> None:
    as_nobody(
        """
def mount():
    return mounting.mount(mountpoint, fsname="dmfs:x", allow_other=True, readahead_kib=640)
fd = mount()
found = mounting.find_mount(mountpoint)
assert (found.owner, found.group) == (os.getuid(), os.getgid()) != (0, 0), found
with open(f"/sys/class/bdi/{found.device}/read_ahead_kb") as file:
    assert file.read() == "640\\n"
server = TinyServer(fd)
held = os.open(mountpoint + "/f", os.O_RDONLY)
try:
    mounting.unmount(mountpoint)
except OSError as exc:
    assert exc.errno == errno.EBUSY, exc
else:
    raise AssertionError("unmounted while in use")
os.close(held)
privileges.settle()  # the daemon's state from here on
mounting.unmount(mountpoint)
assert mounting.find_mount(mountpoint) is None
try:
    mounting.unmount(mountpoint)
except OSError as exc:
    assert exc.errno == errno.EINVAL, exc
else:
    raise AssertionError("unmounted what was not mounted")
""",
        mountpoint=mountpoint,
        drop=WITH_THE_CAPABILITY,
    )


def test_the_capability_alone_unmounts_nobody_elses(folder: Path, mountpoint: str) -> None:
    """A user who moves his folders about must not get a daemon of his to unmount what is not his."""
    serve(mountpoint)
    (folder / "his").symlink_to(folder)
    code = """
for path in (mountpoint, his + "/mnt", "/proc"):
    for lazy in (False, True):
        try:
            mounting.unmount(path, lazy=lazy)
        except FuseUnavailable:
            pass  # refused, and then fusermount3 is looked for
        else:
            raise AssertionError(f"{path} was unmounted")
"""
    as_nobody(code, mountpoint=mountpoint, his=str(folder / "his"), drop=WITH_THE_CAPABILITY)
    assert mounting.find_mount(mountpoint) is not None


def test_the_capability_alone_is_not_led_elsewhere(folder: Path, mountpoint: str) -> None:
    (folder / "link").symlink_to(mountpoint)
    (folder / "up").symlink_to(folder)
    for path in ("link", "up/mnt"):
        code = expect("MountpointError", f"is not in its place any more, it is {mountpoint} now")
        as_nobody(code, mountpoint=str(folder / path), drop=WITH_THE_CAPABILITY)
    assert mounting.find_mount(mountpoint) is None


@pytest.mark.usefixtures("open_fuse_device")
def test_lazy_unmount_as_a_user(mountpoint: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    as_nobody(
        """
server = TinyServer(mounting.mount(mountpoint, fsname="dmfs:x", allow_other=False))
held = os.open(mountpoint, os.O_RDONLY)  # a file's close would, in the forked helper, wait for this very process
mounting.unmount(mountpoint, lazy=True)
assert mounting.find_mount(mountpoint) is None
assert os.fstatvfs(held).f_blocks
os.close(held)
server.thread.join(10)
assert not server.thread.is_alive()
""",
        mountpoint=mountpoint,
    )


@pytest.mark.usefixtures("open_fuse_device")
def test_forced_unmount_as_a_user(mountpoint: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    mounting.abort(999_999)  # mounts fusectl, which a user cannot
    as_nobody(
        """
server = TinyServer(mounting.mount(mountpoint, fsname="dmfs:x", allow_other=False), is_mute=True)
codes = []
def ask():
    try:
        os.statvfs(mountpoint)
    except OSError as exc:
        codes.append(exc.errno)
reader = threading.Thread(target=ask, daemon=True)
reader.start()
minor = mounting.find_mount(mountpoint).device.partition(":")[2]
deadline = time.monotonic() + 10
while open(f"{mounting.CONNECTIONS}/{minor}/waiting").read() == "0\\n":
    assert time.monotonic() < deadline
try:
    mounting.unmount(mountpoint, force=True)
except OSError as exc:  # the reader may still be on its way out
    assert exc.errno == errno.EBUSY, exc
reader.join(10)
server.thread.join(10)
assert codes and not server.thread.is_alive()
""",
        mountpoint=mountpoint,
    )


def test_weird_mountpoint(folder: Path) -> None:
    path = os.path.join(folder, "a b\\c\nd\re#\udce9,f")
    os.mkdir(path)
    serve(path)
    found = mounting.find_mount(path)
    assert found is not None
    assert found.mountpoint == path
    mounting.unmount(path)
    assert mounting.find_mount(path) is None


def test_find_mount_by_other_names(folder: Path, mountpoint: str) -> None:
    serve(mountpoint)
    (folder / "link").symlink_to("mnt")
    (folder / "link2").symlink_to(folder / "link")
    (folder / "up").symlink_to(folder)
    (folder / "loop").symlink_to("loop")
    found = mounting.find_mount(mountpoint)
    assert found is not None
    for name in ("mnt/", "./mnt", "link", "link2/", "up/mnt", "up/link", "up/../" + folder.name + "/mnt"):
        assert mounting.find_mount(str(folder / name)) == found, name
    for name in ("", "loop", "missing", "mnt/f", "missing/mnt"):
        assert mounting.find_mount(str(folder / name)) is None, name
    slash = mounting.find_mount("/")
    assert slash is not None
    assert slash.mountpoint == "/"


def test_find_mount_does_not_touch_the_mount(mountpoint: str) -> None:
    serve(mountpoint, is_mute=True)
    ended = threading.Event()

    def look() -> None:
        found = mounting.find_mount(mountpoint)
        assert found is not None
        mounting.users_of(found)
        ended.set()

    threading.Thread(target=look, daemon=True).start()
    assert ended.wait(10)


def test_topmost_of_stacked_mounts(mountpoint: str) -> None:
    serve(mountpoint, "first")
    serve(mountpoint, "second")
    found = mounting.find_mount(mountpoint)
    assert found is not None
    assert found.source == "second"
    mounting.unmount(mountpoint)
    found = mounting.find_mount(mountpoint)
    assert found is not None
    assert found.source == "first"


def _hold_cwd(mountpoint: str) -> None:
    os.chdir(mountpoint)


def _hold_file(mountpoint: str) -> None:
    os.open(f"{mountpoint}/f", os.O_RDONLY)


def _hold_mapping(mountpoint: str) -> None:
    global _mapping
    with open(f"{mountpoint}/f", "rb") as file:
        _mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    os.closerange(3, 1000)  # the mapping keeps a duplicate


_mapping: mmap.mmap


@contextlib.contextmanager
def holder(hold: Callable[[str], None], mountpoint: str) -> Iterator[int]:
    """A process that holds something of the mount; yields its pid."""
    code = "import sys; from tests.mount.test_mounting import *; from tests.mount import test_mounting as t\n"
    code += f"t.{hold.__name__}(sys.argv[1]); print('holding', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, mountpoint], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        yield process.pid
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.mark.slow
@pytest.mark.parametrize("hold", [_hold_cwd, _hold_file, _hold_mapping])
def test_busy_mount_and_its_users(mountpoint: str, hold: Callable[[str], None]) -> None:
    serve(mountpoint)
    found = mounting.find_mount(mountpoint)
    assert found is not None
    with holder(hold, mountpoint) as pid:
        with pytest.raises(OSError, match="busy") as caught:
            mounting.unmount(mountpoint)
        assert caught.value.errno == errno.EBUSY
        users = mounting.users_of(found)
        assert [user.pid for user in users] == [pid]
        assert users[0].name.startswith("python")
    mounting.unmount(mountpoint)
    assert mounting.users_of(found) == []


def test_unmount_of_what_is_not_mounted(mountpoint: str) -> None:
    with pytest.raises(OSError, match="Invalid") as caught:
        mounting.unmount(mountpoint)
    assert caught.value.errno == errno.EINVAL


def test_lazy_unmount_as_root(mountpoint: str) -> None:
    server = serve(mountpoint)
    with open(f"{mountpoint}/f", "rb", buffering=0) as held:
        mounting.unmount(mountpoint, lazy=True)
        assert mounting.find_mount(mountpoint) is None
        assert held.read(1) == b"x"
    server.thread.join(10)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("way", ["abort", "force"])
def test_waiting_readers_are_freed(mountpoint: str, way: str) -> None:
    server = serve(mountpoint, is_mute=True)
    codes: list[int | None] = []

    def read() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as exc:
            codes.append(exc.errno)

    found = mounting.find_mount(mountpoint)
    assert found is not None
    minor = int(found.device.partition(":")[2])
    assert not mounting.abort(999_999)  # mounts fusectl, too
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + 10
    while Path(f"{mounting.CONNECTIONS}/{minor}/waiting").read_text() == "0\n":
        assert time.monotonic() < deadline
    if way == "abort":
        assert mounting.abort(minor)
    else:
        with contextlib.suppress(OSError):  # busy: the reader may still be on its way out
            mounting.unmount(mountpoint, force=True)
    reader.join(10)
    assert codes
    assert codes[0] in (errno.ECONNABORTED, errno.ENOTCONN, errno.EIO)
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_readahead(mountpoint: str) -> None:
    serve(mountpoint)
    found = mounting.find_mount(mountpoint)
    assert found is not None
    assert mounting.set_readahead(mountpoint, 512)
    assert Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").read_text() == "512\n"
    assert not mounting.set_readahead(f"{mountpoint}/missing", 512)


def test_is_dead(mountpoint: str) -> None:
    assert not mounting.is_dead(mountpoint)
    code = (
        "import sys, time; from tests.mount.test_mounting import serve\n"
        "serve(sys.argv[1]); print('serving', flush=True); time.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", code, mountpoint], cwd=ROOT, stdout=subprocess.PIPE)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n"
        os.stat(mountpoint)  # its attributes are now in the kernel's memory for an hour
        assert not mounting.is_dead(mountpoint)
        server.send_signal(signal.SIGKILL)
    assert mounting.is_dead(mountpoint)
    mounting.unmount(mountpoint)
    assert not mounting.is_dead(mountpoint)


@pytest.mark.slow
def test_a_hanging_mount_is_not_dead(mountpoint: str) -> None:
    serve(mountpoint, is_mute=True)
    assert not mounting.is_dead(mountpoint)


def test_device_missing(mountpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounting, "DEVICE", "/dev/no-such-fuse")
    with pytest.raises(FuseUnavailable, match=r"/dev/no-such-fuse cannot be opened.*modprobe fuse"):
        mounting.mount(mountpoint, fsname="x", allow_other=False)


@pytest.mark.parametrize(("name", "reason"), [("file", "Not a directory"), ("missing", "No such file")])
def test_bad_mountpoint_as_root(folder: Path, name: str, reason: str) -> None:
    (folder / "file").touch()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MountpointError, match=reason):
        mounting.mount(str(folder / name), fsname="x", allow_other=False)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def expect(error: str, words: str, *, allow_other: bool = False) -> str:
    """Code for `as_nobody`: a mount must fail with this error, one sentence that has these words."""
    return f"""
before = len(os.listdir("/proc/self/fd"))
try:
    mounting.mount(mountpoint, fsname="x", allow_other={allow_other})
except {error} as exc:
    assert {words!r} in str(exc) and "\\n" not in str(exc), exc
else:
    raise AssertionError("mounted")
assert len(os.listdir("/proc/self/fd")) == before
"""


@pytest.mark.usefixtures("open_fuse_device")
def test_bad_mountpoint_as_a_user(folder: Path, mountpoint: str) -> None:
    (folder / "file").touch()
    as_nobody(expect("MountpointError", "no write access"), mountpoint=mountpoint)
    as_nobody(expect("MountpointError", "No such file"), mountpoint=str(folder / "missing"))
    as_nobody(expect("MountpointError", "cannot mount on"), mountpoint=str(folder / "file"))


def test_device_not_permitted(mountpoint: str) -> None:
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o600)
    try:
        as_nobody(expect("FuseUnavailable", "/dev/fuse may not be opened by this user"), mountpoint=mountpoint)
    finally:
        os.chmod("/dev/fuse", mode)


@pytest.mark.usefixtures("open_fuse_device")
def test_helper_missing(mountpoint: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    code = "os.environ['PATH'] = ''; mounting._STANDARD_PATH = '/nonexistent'"
    as_nobody(code + expect("FuseUnavailable", "install the package fuse3"), mountpoint=mountpoint)


@pytest.mark.usefixtures("open_fuse_device")
def test_helper_is_found_without_a_path(mountpoint: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    code = "del os.environ['PATH']; os.close(mounting.mount(mountpoint, fsname='x', allow_other=False))"
    as_nobody(code + "\nmounting.unmount(mountpoint)", mountpoint=mountpoint)


@pytest.mark.usefixtures("open_fuse_device")
def test_allow_other_not_permitted(folder: Path, mountpoint: str) -> None:
    os.chown(mountpoint, NOBODY, NOBODY)
    conf = folder / "fuse.conf"
    conf.write_text("#user_allow_other\nmount_max = 10\n")
    point_to = f"mounting.FUSE_CONF = {str(conf)!r}\n"
    as_nobody(
        point_to + expect("FuseUnavailable", "user_allow_other into /etc/fuse.conf", allow_other=True),
        mountpoint=mountpoint,
    )
    as_nobody(
        "mounting.FUSE_CONF = '/nonexistent'" + expect("FuseUnavailable", "user_allow_other", allow_other=True),
        mountpoint=mountpoint,
    )
    if b"\nuser_allow_other" not in Path("/etc/fuse.conf").read_bytes():  # what fusermount3 itself reads
        conf.write_text("user_allow_other\n")
        as_nobody(point_to + expect("FuseUnavailable", "user_allow_other", allow_other=True), mountpoint=mountpoint)


def test_root_without_the_capability(mountpoint: str) -> None:
    drop = """
import ctypes
CAP_SYS_ADMIN = 21
assert ctypes.CDLL(None).prctl(24, CAP_SYS_ADMIN, 0, 0, 0) == 0  # PR_CAPBSET_DROP, takes effect at exec
os.environ["DROPPED"] = "1" if "DROPPED" in os.environ else "0"
if os.environ["DROPPED"] == "0":
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], sys.argv[1]])
"""
    as_nobody(expect("FuseUnavailable", "capability SYS_ADMIN"), mountpoint=mountpoint, drop=drop)
