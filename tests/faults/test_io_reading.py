"""Every way to read a file, in each mode: mapped, direct, by an inherited descriptor, by sendfile, with readers killed,
and a file far larger than it is on the disk.
"""

import contextlib
import hashlib
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import KiB, MiB, content, drop_pages, expect_content, make_files
from tests.support.mounts import WAYS, DmfsMount, MountFactory
from tests.support.ordered_daemon import OrderedMount
from tests.support.waiting import wait_until

SIZE = 9 * MiB + 4097
GiB = 1024 * MiB

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("way", WAYS)]


def copied(mount: DmfsMount, view: Path) -> None:
    """Read a file so that its copy is here and nobody has it open, and nothing of it is in the mount's page cache."""
    view.read_bytes()
    mount.wait_fills_done()
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    drop_pages(view)


@pytest.mark.parametrize("is_copied", [False, True], ids=["cold", "copied"])
def test_mapped(tmp_path: Path, ordered_mount: Callable[..., OrderedMount], way: str, is_copied: bool) -> None:
    """Private and shared, touched at random, also after the descriptor is closed and the copy was asked to go."""
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = ordered_mount(path.parent, way=way)
    view = mount.view / path.name
    if is_copied:
        copied(mount, view)
    fd = os.open(view, os.O_RDONLY)
    shared = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    private = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with shared, private:
        draw = random.Random(1)

        def touch(count: int) -> None:
            for _ in range(count):
                offset = draw.randrange(SIZE - 5000)
                for mapping in (shared, private):
                    expect_content(mapping[offset : offset + 5000], 0, offset, 5000)

        touch(5)
        os.close(fd)
        touch(5)
        mount.wait_fills_done()
        evicted = mount.order("evict")["evicted"]
        if way in ("plain", "passthrough"):  # a mapping is an open; pagecache sees none
            assert evicted == 0, "a copy that is mapped was given up"
        elif way == "pagecache":
            assert evicted == 1
        drop_pages(view)
        touch(20)
        private[100:110] = b"0123456789"
        assert shared[100:110] == content(0, 100, 10)
        assert private[100:110] == b"0123456789"
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    expect_content(view.read_bytes(), 0, 0, SIZE)


@pytest.mark.parametrize("is_copied", [False, True], ids=["cold", "copied"])
def test_direct(
    tmp_path: Path, disk_path: Path, dmfs_mount: MountFactory, way: str, is_copied: bool, request: pytest.FixtureRequest
) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    cache = disk_path / request.node.name
    mount = dmfs_mount(path.parent, way=way, caches=[cache])
    view = mount.view / path.name
    if is_copied:
        copied(mount, view)
    fd = os.open(view, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 2 * MiB) as buffer:  # whole pages, as O_DIRECT wants them
            for offset, length in ((0, 4096), (MiB, 2 * MiB), (12288, 64 * KiB), (SIZE // 4096 * 4096, 8192)):
                wanted = min(length, SIZE - offset)
                with memoryview(buffer)[:length] as part:
                    assert os.preadv(fd, [part], offset) == wanted
                    expect_content(bytes(part[:wanted]), 0, offset, wanted)
    finally:
        os.close(fd)


CHILD = "import os, sys; sys.stdout.buffer.write(os.read(int(sys.argv[1]), int(sys.argv[2])))"


@pytest.mark.parametrize("is_copied", [False, True], ids=["cold", "copied"])
def test_a_child_reads_on_where_its_parent_was(
    tmp_path: Path, dmfs_mount: MountFactory, way: str, is_copied: bool
) -> None:
    """One open file, two processes: one offset, and the parent may close first."""
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = dmfs_mount(path.parent, way=way)
    view = mount.view / path.name
    if is_copied:
        copied(mount, view)
    fd = os.open(view, os.O_RDONLY)
    try:
        expect_content(os.read(fd, 70_000), 0, 0, 70_000)
        command = [sys.executable, "-c", CHILD, str(fd), "90000"]
        data = subprocess.run(command, pass_fds=[fd], capture_output=True, check=True, timeout=20).stdout
        expect_content(data, 0, 70_000, 90_000)
        expect_content(os.read(fd, 1000), 0, 160_000, 1000)
        last = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE)
    finally:
        os.close(fd)
    data, _ = last.communicate(timeout=20)
    expect_content(data, 0, 161_000, 90_000)
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")


GREEDY = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
while True:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(fd, 0, os.SEEK_SET)
    while os.read(fd, 300_000):
        pass
"""


def test_killed_readers_leave_nothing(
    tmp_path: Path, bad_source: Callable, ordered_mount: Callable[..., OrderedMount], way: str
) -> None:
    """Killed while they read a copy, and while they wait for a source that hangs."""
    paths = make_files(tmp_path / "set", [SIZE, SIZE])
    source = bad_source(tmp_path / "set")
    mount = ordered_mount(source.mountpoint, way=way)
    views = [mount.view / path.name for path in paths]
    copied(mount, views[0])
    before = len(os.listdir(f"/proc/{mount.pid}/fd"))
    source.rule("READ", paths[1].name, hangs=True)
    readers = [
        subprocess.Popen([sys.executable, "-c", GREEDY, view], stdout=subprocess.PIPE) for view in views for _ in "123"
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
    wait_until(lambda: source.hanging() > 0, 10, "a reader waits for the source")
    if way == "passthrough":
        known = mount.status()["known"]
        assert known["backing_ids"] - known["backing_ids_idle"] == 1
    for reader in readers:
        reader.kill()
    for reader in readers:
        with reader:
            assert reader.wait(10) == -9

    def is_back(open_at_most: int) -> bool:
        known = mount.status()["known"]
        return known["files_open"] <= open_at_most and known["backing_ids"] == known["backing_ids_idle"]

    # The kernel holds a file for which it reads ahead, and interrupts no such request: only an answer ends it.
    wait_until(lambda: is_back(3), 5, "the readers of the copy are gone")
    source.clear()
    wait_until(lambda: is_back(0), 5, "handles and ids are given back")
    assert mount.order("pins") == 0
    wait_until(
        lambda: len(os.listdir(f"/proc/{mount.pid}/fd")) <= before + 2 * mount.order("fills") + 1,
        10,
        "descriptors are given back",
    )
    expect_content(views[1].read_bytes(), 1, 0, SIZE)
    status = mount.status()
    assert (status["surprises"], status["errors"]) == (0, [])


@pytest.mark.parametrize("is_copied", [False, True], ids=["cold", "copied"])
def test_sendfile(tmp_path: Path, dmfs_mount: MountFactory, way: str, is_copied: bool) -> None:
    (path,) = make_files(tmp_path / "set", [SIZE])
    mount = dmfs_mount(path.parent, way=way)
    view = mount.view / path.name
    if is_copied:
        copied(mount, view)
    with view.open("rb", buffering=0) as file:
        with (tmp_path / "sent").open("w+b", buffering=0) as sent:
            offset = 0
            while count := os.sendfile(sent.fileno(), file.fileno(), offset, SIZE):
                offset += count
        expect_content((tmp_path / "sent").read_bytes(), 0, 0, SIZE)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            count = os.sendfile(ours.fileno(), file.fileno(), 5 * MiB + 17, 100_000)
            assert count > 0
            expect_content(theirs.recv(count, socket.MSG_WAITALL), 0, 5 * MiB + 17, count)


SPARSE = 5 * GiB
DATA_AT = (0, 2 * GiB + 8 * KiB, SPARSE - 4096)


def sparse_file(folder: Path) -> Path:
    """5 GiB of which three blocks are data."""
    folder.mkdir()
    path = folder / "sparse"
    with path.open("wb") as file:
        for offset in DATA_AT:
            file.seek(offset)
            file.write(content(0, offset, 4096))
    return path


def disk_use(folder: Path) -> int:
    """Bytes of disk of all files below."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(root, name)).st_blocks * 512
    return total


def read_around(fd: int) -> None:
    """The end, the data and a hole."""
    assert os.lseek(fd, 0, os.SEEK_END) == SPARSE
    for offset in DATA_AT:
        expect_content(os.pread(fd, 4096, offset), 0, offset, 4096)
    assert os.pread(fd, 100_000, GiB) == bytes(100_000)
    assert os.pread(fd, 4097, SPARSE - 4096) == content(0, SPARSE - 4096, 4096)
    assert os.pread(fd, 1, SPARSE) == b""


def seek_holes(fd: int, way: str) -> None:
    """A hole is where bytes are zero, data where they are not; pyfuse3 shows none, copies show those of 4 MiB."""
    assert os.lseek(fd, 0, os.SEEK_DATA) == 0
    hole = os.lseek(fd, 0, os.SEEK_HOLE)
    if way == "pyfuse3":
        assert hole == SPARSE
        return
    assert 4096 <= hole <= 4 * MiB
    data = os.lseek(fd, hole, os.SEEK_DATA)
    assert DATA_AT[1] - 4 * MiB < data <= DATA_AT[1]
    assert os.lseek(fd, SPARSE - 1, os.SEEK_HOLE) == SPARSE


def test_sparse_file(tmp_path: Path, ordered_mount: Callable[..., OrderedMount], way: str) -> None:
    path = sparse_file(tmp_path / "set")
    mount = ordered_mount(path.parent, way=way)
    started = time.monotonic()
    fd = os.open(mount.view / path.name, os.O_RDONLY)
    try:
        seek_holes(fd, way)
        read_around(fd)
        seek_holes(fd, way)
    finally:
        os.close(fd)
    assert time.monotonic() - started < 5
    assert disk_use(mount.base) < 64 * MiB


@pytest.mark.full
@pytest.mark.timeout(300)
def test_sparse_file_read_whole(tmp_path: Path, ordered_mount: Callable[..., OrderedMount], way: str) -> None:
    path = sparse_file(tmp_path / "set")
    mount = ordered_mount(path.parent, way=way)
    view = mount.view / path.name
    wanted = whole_digest(path)
    for _ in range(2):
        assert whole_digest(view) == wanted
        mount.wait_fills_done(60)
        assert len(mount.copies()) == 1
        assert disk_use(mount.base) < 64 * MiB
        drop_pages(view)
        with view.open("rb", buffering=0) as file:
            read_around(file.fileno())
            seek_holes(file.fileno(), way)


def whole_digest(path: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    buffer = bytearray(4 * MiB)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total.update(memoryview(buffer)[:count])
    return total.hexdigest()
