"""Which mode a mount gets, and what becomes of each when its daemon is killed."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.conftest import NOBODY
from tests.support.files import KiB, MiB, drop_pages, expect_content, make_files
from tests.support.mounts import WAYS, DmfsMount, MountFactory, is_mounted, mount_count, why_no_bind_mounts
from tests.support.ordered_daemon import OrderedMount
from tests.support.waiting import wait_until

SIZES = [300 * KiB, 9 * MiB]
EXIT_CONFIG = 3
EXIT_NO_FUSE = 7


def read_all(folder: Path) -> None:
    for number, size in enumerate(SIZES):
        expect_content((folder / f"{number:05d}.bin").read_bytes(), number, 0, size)


def open_errno(path: Path) -> int:
    """The errno that opening a file ends with; 0 if it can be opened."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as exc:
        return exc.errno or 0
    return 0


def fuse_holders(mount: DmfsMount) -> set[int]:
    """Processes started by a mount's commands that have /dev/fuse open."""
    mark = f"XDG_RUNTIME_DIR={mount.runtime}".encode()
    holders = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if mark not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                for fd in (process / "fd").iterdir():
                    if os.readlink(fd) == "/dev/fuse":
                        holders.add(int(process.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or another user's
    return holders


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_daemon(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set", [*SIZES, 5000])
    mount = dmfs_mount(tmp_path / "set", way=way)
    read_all(mount.view)
    mount.wait_fills_done()
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    assert fuse_holders(mount) == {mount.pid}
    view = mount.view / "00001.bin"
    drop_pages(view)
    fd = os.open(view, os.O_RDONLY)
    try:
        expect_content(os.pread(fd, 5000, 0), 1, 0, 5000)
        mount.kill()
        assert fuse_holders(mount) == set()
        assert open_errno(mount.view / "00002.bin") == errno.ENOTCONN, "of a name that was never looked up"
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            os.listdir(mount.view)
        if way == "pagecache":  # the kernel opens what it knows by itself, and has no more than its page cache
            assert open_errno(mount.view / "00000.bin") == 0
            expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, SIZES[0])
        else:
            assert open_errno(mount.view / "00000.bin") == errno.ENOTCONN
        if way == "passthrough":
            expect_content(os.pread(fd, 9 * MiB, 0), 1, 0, 9 * MiB)
        else:
            with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
                os.pread(fd, 4096, 8 * MiB)
    finally:
        os.close(fd)
    mount.start()
    assert mount_count(mount.view) == 1, "the dead mount is still below the new one"
    read_all(mount.view)
    status = mount.status()
    assert status["source"]["bytes"] == 0, "copies did not survive the kill"


# ---- which mode


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on an overlay file system, as the root of a container is."""
    if reason := why_no_bind_mounts():
        pytest.skip(reason)
    parts = {name: tmp_path / f"overlay-{name}" for name in ("lower", "upper", "work", "view")}
    for part in parts.values():
        part.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, parts["view"]], capture_output=True)
    if done.returncode:
        pytest.skip("this machine mounts no overlay")
    yield parts["view"]
    subprocess.run(["umount", "-l", parts["view"]], check=True)


def test_root_with_a_disk_gets_passthrough(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount(tmp_path / "set")
    status = mount.status()
    assert (status["io_mode"], status["io_mode_reason"]) == ("passthrough", "the kernel reads local copies itself")


@pytest.mark.slow
def test_a_tier_on_an_overlay(tmp_path: Path, overlay: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount(tmp_path / "set", caches=[overlay / "cache"])
    status = mount.status()
    assert status["io_mode"] == "pagecache"
    assert str(overlay / "cache") in status["io_mode_reason"]
    assert "overlay" in status["io_mode_reason"]
    for _ in range(2):
        read_all(mount.view)
        mount.wait_fills_done()
        mount.remount()


@pytest.mark.slow
def test_one_tier_of_two_on_an_overlay(tmp_path: Path, overlay: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount(tmp_path / "set", caches=[f"{overlay / 'cache'}:1MiB", tmp_path / "disk"])
    status = mount.status()
    assert status["io_mode"] == "passthrough"
    assert f"those on {overlay / 'cache'} are read by messages" in status["io_mode_reason"]
    read_all(mount.view)  # the small one goes to the overlay, the large one fits only the disk
    status = mount.wait_fills_done()
    assert [tier["copies"] for tier in status["tiers"]] == [1, 1]
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    for number in range(2):
        drop_pages(mount.view / f"{number:05d}.bin")
    before = mount.status()["served"]
    read_all(mount.view)
    after = mount.status()["served"]
    assert after["kernel"]["opens"] - before["kernel"]["opens"] == 1
    assert after["kernel"]["file_bytes"] - before["kernel"]["file_bytes"] == SIZES[1]
    assert after["local"]["bytes"] - before["local"]["bytes"] == SIZES[0]
    assert mount.status()["errors"] == []


def assert_refused(mount: DmfsMount, exit_code: int, *words: str, flags: Sequence[str] = ()) -> None:
    """One sentence, and nothing left behind."""
    done = mount.command(*mount.mount_arguments(), *flags)
    assert done.returncode == exit_code, done
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line
    assert not is_mounted(mount.view)
    assert fuse_holders(mount) == set()
    assert mount.command("status", str(mount.view)).returncode != 0


def test_passthrough_that_cannot_be_had_on_an_overlay(tmp_path: Path, overlay: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount.prepare(tmp_path / "set", way="passthrough", caches=[overlay / "cache"])
    assert_refused(mount, EXIT_NO_FUSE, "--io passthrough", str(overlay / "cache"), "--io auto")


def test_pyfuse3_has_no_passthrough(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount.prepare(tmp_path / "set", way="passthrough", flags=["--front-end", "pyfuse3"])
    assert_refused(mount, EXIT_CONFIG, "pyfuse3", "--io passthrough", "--front-end kernel")


# ---- an ordinary user


def user_mount(factory: MountFactory, folder: Path, way: str) -> OrderedMount:
    """A mount of an ordinary user by fusermount3, not mounted yet."""
    if shutil.which("fusermount3") is None:
        pytest.skip("no fusermount3")
    make_files(folder / "set", SIZES)
    mount = factory.prepare(folder / "set", kind=OrderedMount, way=way, base=folder, options={"user": NOBODY})
    for path in (mount.view, mount.runtime, folder / "set"):
        os.chown(path, NOBODY, NOBODY)
    assert isinstance(mount, OrderedMount)
    return mount


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "pagecache", "plain"])
def test_an_ordinary_user(user_folder: Path, dmfs_mount: MountFactory, way: str) -> None:
    mount = user_mount(dmfs_mount, user_folder, way).start()
    status = mount.status()
    assert status["io_mode"] == ("plain" if way == "plain" else "pagecache")
    if way == "auto":
        assert "CAP_SYS_ADMIN" in status["io_mode_reason"]
    for _ in range(2):
        for number, size in enumerate(SIZES):
            done = subprocess.run(
                ["cat", mount.view / f"{number:05d}.bin"],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                capture_output=True,
                timeout=20,
            )
            assert done.returncode == 0, done.stderr
            expect_content(done.stdout, number, 0, size)
    status = mount.wait_fills_done()
    assert status["tiers"][0]["copies"] == len(SIZES)
    assert (status["surprises"], status["errors"]) == (0, [])


def test_an_ordinary_user_gets_no_passthrough(user_folder: Path, dmfs_mount: MountFactory) -> None:
    mount = user_mount(dmfs_mount, user_folder, "passthrough")
    # In the foreground, as this Python may be out of the user's reach.
    assert_refused(mount, EXIT_NO_FUSE, "CAP_SYS_ADMIN", "--io auto", flags=["--foreground"])
