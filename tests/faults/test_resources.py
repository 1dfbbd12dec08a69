"""What a mount leaves open, and whom it lets look: cases B12, D12, F08."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.files import KiB, drop_pages, expect_content, make_files
from tests.support.mounts import WAYS, DmfsMount, MountFactory
from tests.support.waiting import wait_until


def open_files(mount: DmfsMount) -> int:
    """Descriptors of the daemon."""
    return len(os.listdir(f"/proc/{mount.pid}/fd"))


@pytest.mark.parametrize("way", WAYS)
def test_reading_the_same_file_again_and_again(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    size = 300 * KiB
    make_files(tmp_path / "set", [size])
    mount = dmfs_mount(tmp_path / "set", way=way)
    view = mount.view / "00000.bin"
    expect_content(view.read_bytes(), 0, 0, size)
    mount.wait_fills_done()
    before, threads = open_files(mount), len(os.listdir(f"/proc/{mount.pid}/task"))
    for _ in range(100):
        drop_pages(view)
        expect_content(view.read_bytes(), 0, 0, size)
        subprocess.run(["head", "-c", "1000", view], stdout=subprocess.DEVNULL, check=True)
    readers = [subprocess.Popen(["cat", view], stdout=subprocess.DEVNULL) for _ in range(20)]
    assert [reader.wait(20) for reader in readers] == [0] * 20
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    assert open_files(mount) <= before, "descriptors pile up"
    assert len(os.listdir(f"/proc/{mount.pid}/task")) <= threads + 16, "threads pile up"


def test_nobody_else_may_look(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [5000, 5 * 1024 * KiB])
    before = os.umask(0)
    try:
        mount = dmfs_mount(tmp_path / "set")
    finally:
        os.umask(before)
    for number, size in enumerate([5000, 5 * 1024 * KiB]):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, size)
    mount.wait_fills_done()
    looked_at = 0
    for root in (mount.base / "cache", mount.runtime / "dmfs"):
        for path in (root, *root.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            wanted = 0o700 if path.is_dir() else 0o600
            assert mode & ~wanted == 0, f"{path.relative_to(mount.base)} has mode {mode:04o}"
            looked_at += 1
    assert looked_at > 6
    assert stat.S_IMODE(mount.log_path.stat().st_mode) & 0o077 == 0, "the log is readable by others"


@pytest.mark.parametrize("kind", ["link", "other-owner"])
def test_prepared_cache_folder_is_refused(tmp_path: Path, dmfs_mount: MountFactory, kind: str) -> None:
    """Somebody else made the folder of the cache beforehand, or a link in its place."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to somebody else needs root")
    make_files(tmp_path / "set", [5000])
    mount = dmfs_mount.prepare(tmp_path / "set")
    mount.start()
    mount.umount()
    (folder,) = [p for p in (mount.base / "cache").iterdir() if p.is_dir()]
    if kind == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        os.chown(folder, 12345, 12345)
    done = mount.command(*mount.mount_arguments())
    assert done.returncode == 6, done
    assert str(folder.name) in done.stderr or str(folder.parent) in done.stderr
    if kind == "link":
        folder.unlink()
