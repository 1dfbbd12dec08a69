"""The pagecache mode, where no open and no close is seen: what is held for whom, until when, and in which memory."""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import MiB, drop_pages, expect_content, make_files, write_file
from tests.support.mounts import DmfsMount
from tests.support.ordered_daemon import OrderedMount
from tests.support.waiting import wait_until

SIZE = 9 * MiB + 5000  # more than `open_wait`: no such file is fetched whole because of its first block
FEW = 16  # pages

pytestmark = pytest.mark.slow

_libc = ctypes.CDLL(None, use_errno=True)


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache: mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2) as view:
        count = -(-len(view) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(view)
        try:
            assert _libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(view)), found) == 0
        finally:
            del start  # or the mapping could not be closed
        return sum(byte & 1 for byte in found)


def deleted_files(mount: DmfsMount) -> list[str]:
    """Files without a name that the daemon has open, whose space is not free."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{mount.pid}/fd").iterdir()]
    return [link for link in links if link.endswith(" (deleted)")]


def the_copy(mount: DmfsMount) -> Path:
    """The only copy there is, written to the disk: pages that are not cannot be dropped."""
    (copy,) = [p for p in Path(mount.caches[0]).glob("*/objects/*") if p.suffix != ".sums"]
    fd = os.open(copy, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return copy


def test_data_lies_in_memory_once(
    tmp_path: Path, disk_path: Path, ordered_mount: Callable[..., OrderedMount], request: pytest.FixtureRequest
) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    cache = disk_path / request.node.name
    mount = ordered_mount(path.parent, way="pagecache", caches=[cache], options={"written_after": 1.0})
    view = mount.view / path.name
    expect_content(view.read_bytes(), 0, 0, SIZE)
    mount.wait_fills_done()
    copy = the_copy(mount)
    wait_until(lambda: cached_pages(copy) <= FEW, 5, "the pages of the fresh copy are dropped")
    assert cached_pages(view) == -(-SIZE // mmap.PAGESIZE), "nor does the mount keep them"

    mount.remount()
    assert copy.stat().st_size == len(copy.read_bytes())
    assert cached_pages(copy) > SIZE // mmap.PAGESIZE // 2, "this shows nothing"
    expect_content(view.read_bytes(), 0, 0, SIZE)
    wait_until(lambda: cached_pages(copy) <= FEW, 5, "the pages of the copy are dropped once it was served")
    assert cached_pages(view) == -(-SIZE // mmap.PAGESIZE), "nor does the mount keep them"
    assert mount.order("evict") == {"evicted": 1, "left": 0}
    wait_until(lambda: not deleted_files(mount), 5, "the space of the copy is free again")


@pytest.mark.parametrize("way_to_change", ["rename", "in-place", "remove"])
def test_a_superseded_version_that_is_open(
    tmp_path: Path, ordered_mount: Callable[..., OrderedMount], way_to_change: str
) -> None:
    """Its copy stays until the kernel has forgotten it."""
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = ordered_mount(path.parent, way="pagecache", immutable=False, flags=["--metadata-ttl", "0"])
    view = mount.view / path.name
    expect_content(view.read_bytes(), 0, 0, SIZE)
    mount.wait_fills_done()
    with view.open("rb", buffering=0) as held:
        if way_to_change == "remove":
            path.unlink()
            wait_until(lambda: not view.exists(), 5, "the name is gone")
        else:
            changed = tmp_path / "changed" if way_to_change == "rename" else path
            write_file(changed, 0, SIZE + 1000, 1)
            changed.rename(path)
            wait_until(lambda: view.stat().st_size == SIZE + 1000, 5, "the new version is seen")
        assert mount.order("pins") == 1
        assert mount.order("evict") == {"evicted": 0, "left": 1}
        for _ in range(2):
            os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            expect_content(os.pread(held.fileno(), SIZE, 0), 0, 0, SIZE)
        if way_to_change != "remove":
            expect_content(view.read_bytes(), 0, 0, SIZE + 1000, 1)
    wait_until(lambda: mount.order("pins") == 0, 5, "the kernel has forgotten the old version")
    mount.wait_fills_done()
    assert mount.order("evict")["left"] == 0
    assert mount.status()["errors"] == []


def test_a_superseded_version_that_was_never_cached(tmp_path: Path, ordered_mount: Callable[..., OrderedMount]) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = ordered_mount(path.parent, way="pagecache", immutable=False, flags=["--metadata-ttl", "3600"])
    view = mount.view / path.name
    with view.open("rb", buffering=0) as held:
        write_file(tmp_path / "changed", 0, SIZE + 1000, 1)
        (tmp_path / "changed").rename(path)
        for offset in (0, 5 * MiB):
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                os.pread(held.fileno(), 100, offset)
        with view.open("rb", buffering=0) as opened:
            assert os.fstat(opened.fileno()).st_size == SIZE + 1000
            expect_content(os.pread(opened.fileno(), SIZE + 1000, 0), 0, 0, SIZE + 1000, 1)
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                os.pread(held.fileno(), 100, 8 * MiB)
    assert mount.status()["surprises"] == 0


def start_a_fill(mount: OrderedMount, view: Path) -> None:
    """Look at the first block of a large file only."""
    with view.open("rb", buffering=0) as file:
        expect_content(os.pread(file.fileno(), 4096, 0), 0, 0, 4096)
    assert mount.order("fills") == 1
    assert len(mount.leftovers()) == 1


def test_a_file_begun_and_left_alone_is_dropped(tmp_path: Path, ordered_mount: Callable[..., OrderedMount]) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = ordered_mount(path.parent, way="pagecache", options={"unopened_for": 0.5})
    view = mount.view / path.name
    before = len(os.listdir(f"/proc/{mount.pid}/fd"))
    start_a_fill(mount, view)
    wait_until(lambda: mount.order("fills") == 0, 5, "the fill is dropped")
    wait_until(lambda: not mount.leftovers(), 5, "its file is removed")
    wait_until(lambda: len(os.listdir(f"/proc/{mount.pid}/fd")) <= before, 5, "descriptors are given back")
    assert mount.status()["tiers"][0]["used_bytes"] == 0
    expect_content(view.read_bytes(), 0, 0, SIZE)
    assert mount.wait_fills_done()["fills"]["done"] == 1


def test_a_file_that_is_read_is_not_dropped(tmp_path: Path, ordered_mount: Callable[..., OrderedMount]) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = ordered_mount(path.parent, way="pagecache", options={"unopened_for": 0.5})
    view = mount.view / path.name
    start_a_fill(mount, view)
    until = time.monotonic() + 1.5  # three times as long
    while time.monotonic() < until:
        drop_pages(view)
        with view.open("rb", buffering=0) as file:
            expect_content(os.pread(file.fileno(), 4096, 0), 0, 0, 4096)
        assert mount.order("fills") == 1, "the fill was dropped while its file was read"
    assert mount.status()["source"]["bytes"] <= 4 * MiB
