"""A source that answers errors: what is cached is served, the rest gets that very error, nothing is lost (A14)."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.posix.target import raises_errno
from tests.support.files import KiB, MiB, drop_pages, expect_content, make_files
from tests.support.mounts import WAYS, DmfsMount, MountFactory
from tests.support.waiting import wait_until

ERRORS = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EACCES]
SIZES = [300 * KiB, 9 * MiB, 5000, 0]
CACHED, LARGE, COLD, EMPTY = range(4)


def outcome(operation: Callable[[], object]) -> object:
    """What the operation returns, or the errno it fails with, marked as such."""
    try:
        return operation()
    except OSError as exc:
        return f"errno {errno.errorcode.get(exc.errno or 0, exc.errno)}"


def assert_served(operation: Callable[[], object], wanted: object, code: int) -> None:
    """The operation gives what it gave before, or the source's error; never something else."""
    got = outcome(operation)
    assert got in (wanted, f"errno {errno.errorcode[code]}"), f"{str(got)[:200]} while the source says {code}"


@pytest.fixture
def cached(tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory) -> Callable[..., tuple]:
    """A function that gives (badsrc, mount) with all files but one cached, and metadata that is never believed."""

    def start(way: str = "auto", ttl: str = "0") -> tuple:
        make_files(tmp_path / "set", SIZES)
        source = bad_source(tmp_path / "set", attr_timeout=0)
        mount = dmfs_mount(source.mountpoint, way=way, immutable=False, flags=["--metadata-ttl", ttl])
        for number in (CACHED, LARGE, EMPTY):
            expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, SIZES[number])
        mount.wait_fills_done()
        wait_until(lambda: len(mount.copies()) >= 2, 5, "the copies are published")
        return source, mount

    return start


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_every_operation_fails(cached: Callable, code: int, way: str) -> None:
    source, mount = cached(way)
    view = mount.view
    names = sorted(os.listdir(view))
    before = {number: (view / f"{number:05d}.bin").stat() for number in (CACHED, LARGE, EMPTY)}
    copies = mount.copies()
    rule = source.rule(error=code)

    for number, st in before.items():
        path = view / f"{number:05d}.bin"
        assert_served(path.stat, st, code)
        assert_served(lambda path=path, number=number: matches(path, number), True, code)
    assert_served(lambda: sorted(os.listdir(view)), names, code)
    assert outcome((view / f"{COLD:05d}.bin").read_bytes) == f"errno {errno.errorcode[code]}", "a file that nobody has"
    assert outcome((view / "no such name").stat) == f"errno {errno.errorcode[code]}", (
        "only the source knows what is not"
    )
    assert source.calls(rule) > 0, "the source was not asked at all, so this shows nothing"

    source.clear()
    assert mount.copies() == copies, "copies were lost while the source failed"
    source.reset()
    for number in (CACHED, LARGE, COLD, EMPTY):
        expect_content((view / f"{number:05d}.bin").read_bytes(), number, 0, SIZES[number])
    assert source.counters().bytes == SIZES[COLD], "cached files were fetched again"
    with raises_errno(errno.ENOENT):
        (view / "no such name").stat()
    assert mount.status()["surprises"] == 0


def matches(path: Path, number: int) -> bool:
    """Open and read the file anew; an OSError is the caller's."""
    drop_pages(path)
    expect_content(path.read_bytes(), number, 0, SIZES[number])
    return True


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN], ids=errno.errorcode.get)
def test_source_away_means_served_from_what_is_known(cached: Callable, code: int) -> None:
    """Promise 2: while the source is away, what the daemon knows and holds is served, stale attributes included."""
    source, mount = cached()
    names = sorted(os.listdir(mount.view))
    st = (mount.view / f"{CACHED:05d}.bin").stat()
    source.rule(error=code)
    for _ in range(3):
        assert sorted(os.listdir(mount.view)) == names
        assert (mount.view / f"{CACHED:05d}.bin").stat() == st
        assert matches(mount.view / f"{CACHED:05d}.bin", CACHED)
        assert matches(mount.view / f"{LARGE:05d}.bin", LARGE)
    assert mount.status()["stale_served"] > 0


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_reads_fail_in_the_middle(tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, code: int) -> None:
    make_files(tmp_path / "set", [9 * MiB, 1 * MiB])
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint)
    source.rule("READ", "00000.bin", after=5 * MiB, error=code)
    source.rule("READ", "00001.bin", after=500 * KiB, error=code)
    for number in (0, 1):
        got = outcome((mount.view / f"{number:05d}.bin").read_bytes)
        assert got == f"errno {errno.errorcode[code]}", f"{str(got)[:100]}, not the source's own error"
    fd = os.open(mount.view / "00000.bin", os.O_RDONLY)
    try:
        expect_content(os.pread(fd, 5000, 1 * MiB), 0, 1 * MiB, 5000)
    finally:
        os.close(fd)
    assert mount.copies() == [], "a file that could not be read was published"
    source.clear()
    for number, size in enumerate([9 * MiB, 1 * MiB]):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, size)
    mount.wait_fills_done()
    assert len(mount.copies()) == 2
    assert mount.leftovers() == [], "failed fills left their files behind"


def test_one_failure_is_not_for_ever(tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [5000])
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint)
    os.listdir(mount.view)
    for operation in ("OPEN", "READ", "LOOKUP"):
        source.rule(operation, "00000.bin", error=errno.EIO, times=1)
    wait_until(
        lambda: outcome((mount.view / "00000.bin").read_bytes) == (tmp_path / "set/00000.bin").read_bytes(),
        5,
        "it reads",
    )


def test_permission_to_read_is_the_sources(tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory) -> None:
    """A file the daemon may not open fails with that, and its neighbours are well."""
    make_files(tmp_path / "set", [5000, 6000])
    source = bad_source(tmp_path / "set")
    source.rule("OPEN", "00000.bin", error=errno.EACCES)
    mount = dmfs_mount(source.mountpoint)
    with raises_errno(errno.EACCES):
        (mount.view / "00000.bin").read_bytes()
    expect_content((mount.view / "00001.bin").read_bytes(), 1, 0, 6000)
    assert mount.status()["surprises"] == 0


def test_dead_source(cached: Callable) -> None:
    """The source's own server is killed: cached files go on, whatever the source says."""
    source, mount = cached()
    source.kill()
    for number in (CACHED, LARGE):
        assert matches(mount.view / f"{number:05d}.bin", number)
    got = outcome((mount.view / f"{COLD:05d}.bin").read_bytes)
    assert got in ("errno ENOTCONN", "errno ECONNABORTED", "errno EIO"), f"{str(got)[:100]}"
    assert isinstance(mount, DmfsMount)
