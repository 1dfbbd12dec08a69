"""Readers get the bytes of one version of the right file, whatever the source does: cases A01, A04, A05, A12, A22."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import KiB, MiB, content, digest, drop_pages, expect_content, make_files, write_file
from tests.support.mounts import WAYS, DmfsMount, MountFactory
from tests.support.waiting import wait_until

PIECE = 4 * MiB
OPEN_WAIT = 8 * MiB

A01_SIZES = [0, 1, 4095, 4096, 4097, 131071, 131072, 131073, 327680, 1 * MiB + 1, 9 * MiB + 1]
A01_REQUESTS = [4096, 65536, 131072, 1 * MiB, 16 * MiB]


@pytest.mark.parametrize("way", WAYS)
def test_short_deliveries_of_the_source(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, way: str
) -> None:
    paths = make_files(tmp_path / "set", A01_SIZES)
    source = bad_source(tmp_path / "set")
    short = source.rule("READ", limit=10_000)
    mount = dmfs_mount(source.mountpoint, way=way)
    for number, (path, size) in enumerate(zip(paths, A01_SIZES, strict=True)):
        view = mount.view / path.name
        read_in_every_way(view, number, size)
        wanted = digest(path)
        for request in A01_REQUESTS:
            drop_pages(view)
            assert digest(view, request) == wanted, f"{size} bytes read by {request}"
    assert source.calls(short) > sum(A01_SIZES) // 10_000, "the source did not deliver short"


def read_in_every_way(view: Path, number: int, size: int) -> None:
    """preads around the end of a file that nobody has read yet."""
    fd = os.open(view, os.O_RDONLY)
    try:
        for offset in (size, size + 1, 2**62):
            assert os.pread(fd, 10, offset) == b""
        if size:
            expect_content(os.pread(fd, 10, size - 1), number, size - 1, 1)
        if size > 7:
            expect_content(os.pread(fd, 14, size - 7), number, size - 7, 7)
        expect_content(os.pread(fd, size + 1, 0), number, 0, size)
    finally:
        os.close(fd)


BIG = 16 * PIECE + 600 * KiB


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of 64 MiB and a bit: sixteen pieces are 99 % of it."""
    folder = tmp_path_factory.mktemp("big")
    make_files(folder, [BIG])
    return folder


@pytest.mark.parametrize("pieces", [2, 8, 16])
def test_kill_in_the_middle_of_a_fill(big: Path, bad_source: Callable, dmfs_mount: MountFactory, pieces: int) -> None:
    source = bad_source(big)
    source.rule("READ", after=pieces * PIECE, hangs=True)
    mount = dmfs_mount(source.mountpoint)
    reader = subprocess.Popen(["cat", mount.view / "00000.bin"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: mount.status()["fills"]["bytes"] >= pieces * PIECE, 20, f"{pieces} pieces are written")
    assert mount.status()["fills"]["done"] == 0
    assert mount.leftovers(), "no piece is on the disk, so this shows nothing"
    mount.send_signal(signal.SIGKILL)
    source.clear()
    assert reader.wait(10) != 0, "the reader got a whole file from a dead mount"
    assert mount.copies() == [], "an unfinished file was published"
    wait_until(lambda: not mount.is_alive(), 10, "the daemon is gone")

    mount.start()
    data = (mount.view / "00000.bin").read_bytes()
    expect_content(data, 0, 0, BIG)
    mount.wait_fills_done()
    assert len(mount.copies()) == 1
    assert mount.leftovers() == [], "the dead daemon's unfinished file is still there"
    source.reset()
    mount.remount()
    assert digest(mount.view / "00000.bin") == digest(big / "00000.bin")
    assert source.counters().bytes == 0, "the copy was not used"


OLD_AND_NEW_SIZES = [(12, 14), (14, 12), (0, 5), (5, 0), (100_000, 300_000), (300_000, 100_000), (4096, 4096)]


def expect_one_estale(view: Path, offset: int = 0) -> None:
    """Where no open is seen, the first read of a version that is gone says so, and the next open is right."""
    with view.open("rb", buffering=0) as file, pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        os.pread(file.fileno(), 100, offset)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ttl", ["3600", "0"])
def test_overwritten_after_a_stat(tmp_path: Path, dmfs_mount: MountFactory, ttl: str, way: str) -> None:
    paths = make_files(tmp_path / "set", [old for old, _ in OLD_AND_NEW_SIZES])
    mount = dmfs_mount(tmp_path / "set", immutable=False, way=way, flags=["--metadata-ttl", ttl])
    for path, (old, _) in zip(paths, OLD_AND_NEW_SIZES, strict=True):
        assert (mount.view / path.name).stat().st_size == old
    for number, (path, (old, new)) in enumerate(zip(paths, OLD_AND_NEW_SIZES, strict=True)):
        view = mount.view / path.name
        write_file(path, number, new, version=1)
        if way == "pagecache" and ttl != "0" and old:
            expect_one_estale(view)
        data = view.read_bytes()
        if ttl != "0" and old == 0 and not data:
            continue  # an empty file needs nothing from the source, so it may be believed for the whole of its TTL
        expect_content(data, number, 0, new, version=1)
        assert view.stat().st_size == new


@pytest.mark.parametrize("way", WAYS)
def test_appended_while_open(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    path = tmp_path / "set" / "growing.log"
    path.parent.mkdir()
    path.write_bytes(b"first line\n")
    mount = dmfs_mount(path.parent, immutable=False, way=way, flags=["--metadata-ttl", "1"])
    view = mount.view / path.name
    with view.open("rb", buffering=0) as file:
        assert file.read(100) == b"first line\n"
        with path.open("ab") as writer:
            writer.write(b"second line\n")
        drop_pages(view)
        assert os.pread(file.fileno(), 100, 0) in (b"first line\n", b"first line\nsecond line\n")
        wait_until(lambda: view.read_bytes() == b"first line\nsecond line\n", 4, "the appended line is seen")
        held = os.pread(file.fileno(), 100, 0)
        assert held in (b"first line\n", b"first line\nsecond line\n"), f"the old handle shows a mixture: {held!r}"


@pytest.mark.parametrize("way", WAYS)
def test_cut_between_open_and_read(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    secret = b"\xa5"
    (tmp_path / "set").mkdir()
    (tmp_path / "set/secret").write_bytes(secret * (12 * MiB))
    cut_at, size = 5 * MiB + 100, 16 * MiB
    write_file(tmp_path / "set/b", 1, size)
    mount = dmfs_mount(tmp_path / "set", immutable=False, way=way)
    assert (mount.view / "secret").read_bytes().count(secret) == 12 * MiB
    fd = os.open(mount.view / "b", os.O_RDONLY)
    try:
        expect_content(os.pread(fd, 10_000, 0), 1, 0, 10_000)
        os.truncate(tmp_path / "set/b", cut_at)
        for offset in (4 * MiB, cut_at - 5000, 8 * MiB, size - 5000):
            outcome = read_or_errno(fd, 10_000, offset)
            if isinstance(outcome, int):
                assert outcome in (errno.ESTALE, errno.EIO), errno.errorcode[outcome]
            else:
                old = content(1, offset, min(10_000, size - offset))
                cut = content(1, offset, max(0, min(10_000, cut_at - offset)))
                assert outcome in (old, cut), f"{len(outcome)} bytes at {offset} are neither the old nor the cut file's"
    finally:
        os.close(fd)
    assert (mount.view / "b").stat().st_size in (size, cut_at)


def read_or_errno(fd: int, length: int, offset: int) -> bytes | int:
    """What a pread gives, or the errno it fails with."""
    try:
        return os.pread(fd, length, offset)
    except OSError as exc:
        return exc.errno or 0


@pytest.mark.parametrize("way", WAYS)
def test_rewritten_again_and_again_with_a_long_ttl(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    size = OPEN_WAIT + 1 * MiB
    (path,) = make_files(tmp_path / "set", [size])
    mount = dmfs_mount(path.parent, immutable=False, way=way, flags=["--metadata-ttl", "3600"])
    view = mount.view / path.name
    for version in range(5):
        length = size + version * 1000
        write_file(path, 0, length, version)
        if way == "pagecache" and version:
            expect_one_estale(view, size - 100)  # the beginning is in the page cache, and believed
        with view.open("rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == length, f"version {version}: the open has the old size"
            expect_content(file.read(5000), 0, 0, 5000, version)
            if version == 4:
                expect_content(os.pread(file.fileno(), length, 0), 0, 0, length, version)


def test_file_larger_than_the_cache(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    size = 20 * MiB + 77
    make_files(tmp_path / "set", [size])
    base = tmp_path / "cache"
    mount = dmfs_mount(tmp_path / "set", caches=[f"{base}:8MiB"])
    view = mount.view / "00000.bin"
    fd = os.open(view, os.O_RDONLY)
    try:
        for step in range(60):
            offset = (size - (step + 1) * 300_000) % size if step % 2 else step * 7_777_777 % size
            length = min(200_000, size - offset)
            expect_content(os.pread(fd, length, offset), 0, offset, length)
    finally:
        os.close(fd)
    drop_pages(view)
    expect_content(view.read_bytes(), 0, 0, size)
    assert_capacity(mount, 8 * MiB)
    assert mount.copies() == []


def assert_capacity(mount: DmfsMount, capacity: int) -> None:
    """Neither what is on the disk nor what the status says is above the capacity."""
    (tier,) = mount.status()["tiers"]
    assert tier["used_bytes"] <= capacity
    folder = Path(mount.caches[0].rpartition(":")[0])
    blocks = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    assert blocks <= capacity + 64 * KiB, "more on the disk than the capacity (and a few small files)"


def test_quota_smaller_than_the_set(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    """What does not fit is read from the source, and never stops the placing of what comes later."""
    sizes = [3 * MiB, 12 * MiB, 3 * MiB, 12 * MiB, 1 * MiB, 2 * MiB, 500 * KiB]
    make_files(tmp_path / "set", sizes)
    mount = dmfs_mount(tmp_path / "set", caches=[f"{tmp_path / 'cache'}:8MiB"])
    for number, size in enumerate(sizes):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, size)
        assert_capacity(mount, 8 * MiB)
    mount.wait_fills_done()
    assert len(mount.copies()) == 4, "3 + 3 + 1 MiB and 500 KiB fit into 8 MiB"
    assert mount.leftovers() == []


@pytest.mark.parametrize("way", WAYS)
def test_reading_a_sparse_file_keeps_its_length(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    (tmp_path / "set").mkdir()
    path = tmp_path / "set/sparse"
    write_file(path, 0, 4096)
    os.truncate(path, 30 * MiB + 5)
    mount = dmfs_mount(path.parent, way=way)
    for _ in range(2):
        data = (mount.view / "sparse").read_bytes()
        assert len(data) == 30 * MiB + 5
        expect_content(data[:4096], 0, 0, 4096)
        assert data.count(0, 4096) == 30 * MiB + 5 - 4096
        mount.wait_fills_done()
        mount.remount()
