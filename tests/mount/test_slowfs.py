"""slowfs, the stand-in for a parallel file system: what it shows, what it counts, how slow it is, how it ends."""

import contextlib
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmfs.fuse import mounting
from scripts.lib.slowfs_client import SlowFs, SlowFsError
from scripts.lib.slowfs_server import Counters
from tests.support.files import KiB, MiB, explain, write_file
from tests.support.mounts import why_no_mounts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(why_no_mounts() is not None, reason=str(why_no_mounts()))

PROGRAM = Path(__file__).parents[2] / "scripts" / "slowfs.py"
Start = Callable[..., SlowFs]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


@pytest.fixture
def start(tmp_path: Path, source: Path) -> Iterator[Start]:
    """Starts slowfs over `source` with these options."""
    started: list[SlowFs] = []

    def _start(**options: float) -> SlowFs:
        slow = SlowFs(source, tmp_path / "slow", **options)
        started.append(slow)
        slow.start()
        return slow

    yield _start
    for slow in started:
        slow.stop()


def read_all(path: Path) -> bytes:
    """The content by 1 MiB requests into a page-aligned buffer, so that each is one READ."""
    parts = []
    with mmap.mmap(-1, MiB) as buffer:
        fd = os.open(path, os.O_RDONLY)
        try:
            while count := os.readv(fd, [buffer]):
                parts.append(buffer[:count])
        finally:
            os.close(fd)
    return b"".join(parts)


def test_counts_are_exact(source: Path, start: Start) -> None:
    write_file(source / "small", 1, 1000)
    write_file(source / "large", 2, 3 * MiB + 5)
    (source / "folder").mkdir()
    slow = start(attr_timeout=1000)
    os.stat(slow.mountpoint)
    slow.reset()
    assert slow.counters() == Counters()

    assert explain(read_all(slow.mountpoint / "small"), 1, 0) is None
    assert slow.counters() == Counters(opens=1, reads=2, bytes=1000, stats=1)  # the second READ finds the end

    assert explain(read_all(slow.mountpoint / "large"), 2, 0) is None
    assert slow.counters() == Counters(opens=2, reads=2 + 5, bytes=1000 + 3 * MiB + 5, stats=2)

    read_all(slow.mountpoint / "small")
    assert slow.counters().bytes == 2000 + 3 * MiB + 5  # nothing was kept
    assert slow.counters().stats == 2

    assert sorted(os.listdir(slow.mountpoint)) == ["folder", "large", "small"]
    assert slow.counters().listings == 1
    before = slow.counters().stats
    for _ in range(3):
        assert not os.path.exists(slow.mountpoint / "missing")
    assert slow.counters().stats == before + 3


def test_counters_by_extended_attribute(source: Path, start: Start) -> None:
    write_file(source / "file", 1, 10)
    slow = start()
    read_all(slow.mountpoint / "file")
    before = slow.counters()
    shown = json.loads(os.getxattr(slow.mountpoint, "user.slowfs.stats"))
    assert shown["bytes"] == before.bytes == 10
    assert slow.counters().stats - before.stats <= 1  # the path's, not the attribute's
    with pytest.raises(OSError, match="No data"):
        os.getxattr(slow.mountpoint, "user.missing")


@pytest.mark.parametrize("age", [0, 86_400])
def test_attributes_are_those_of_the_source(source: Path, start: Start, age: int) -> None:
    write_file(source / "file", 1, 5000)
    os.link(source / "file", source / "second name")
    os.utime(source / "file", ns=(1_500_000_000, -1_500_000_000))
    os.chmod(source / "file", 0o640)
    (source / "folder").mkdir()
    (source / "link").symlink_to("where/ever")
    os.mkfifo(source / "pipe")
    (source / "sparse").touch()
    os.truncate(source / "sparse", 10 * MiB)
    os.close(os.open(os.fsencode(source) + b"/\xff\n", os.O_CREAT))
    slow = start(age=age)
    names = [*os.listdir(source), "."]
    assert sorted(os.listdir(slow.mountpoint)) == sorted(os.listdir(source))
    for name in names:
        want, got = os.lstat(source / name), os.lstat(slow.mountpoint / name)
        for field in ("mode", "ino", "nlink", "uid", "gid", "size", "blocks", "blksize", "atime_ns", "rdev"):
            assert getattr(got, f"st_{field}") == getattr(want, f"st_{field}"), (name, field)
        for field in ("st_mtime_ns", "st_ctime_ns"):
            assert getattr(want, field) - getattr(got, field) == age * 10**9, (name, field)
    assert os.readlink(slow.mountpoint / "link") == "where/ever"
    assert os.stat(slow.mountpoint / "second name").st_nlink == 2
    fd = os.open(slow.mountpoint / "sparse", os.O_RDONLY)
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    os.close(fd)
    assert os.statvfs(slow.mountpoint).f_blocks == os.statvfs(source).f_blocks


def test_it_is_read_only(source: Path, start: Start) -> None:
    write_file(source / "file", 1, 10)
    slow = start()
    for act in (
        lambda: os.open(slow.mountpoint / "file", os.O_RDWR),
        lambda: os.mkdir(slow.mountpoint / "new"),
        lambda: os.unlink(slow.mountpoint / "file"),
        lambda: os.truncate(slow.mountpoint / "file", 0),
    ):
        with pytest.raises(OSError, match="Read-only") as caught:
            act()
        assert caught.value.errno == errno.EROFS


@pytest.mark.slow
def test_large_listing(source: Path, start: Start) -> None:
    names = {f"{i:05d}-{'x' * (i % 40)}" for i in range(20_000)}
    for name in names:
        os.close(os.open(source / name, os.O_CREAT))
    os.mkdir(source / "folder")
    slow = start()
    with os.scandir(slow.mountpoint) as scan:
        found = {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in scan}
    with os.scandir(source) as scan:
        assert found == {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in scan}
    assert set(found) == names | {"folder"}
    counters = slow.counters()
    assert counters.listings == 1
    assert counters.stats <= 2  # no look-up per name


def test_a_rewound_listing_is_a_new_one(source: Path, start: Start) -> None:
    (source / "old").touch()
    slow = start(attr_timeout=0)
    fd = os.open(slow.mountpoint, os.O_RDONLY)
    assert os.listdir(fd) == ["old"]
    (source / "new").touch()
    os.lseek(fd, 0, os.SEEK_SET)
    assert sorted(os.listdir(fd)) == ["new", "old"]
    os.close(fd)


def test_mappings(source: Path, start: Start) -> None:
    write_file(source / "file", 7, 3 * MiB + 100)
    slow = start()
    with open(slow.mountpoint / "file", "rb") as file:
        for options in ({"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}, {"flags": mmap.MAP_PRIVATE}):
            with mmap.mmap(file.fileno(), 0, **options) as mapping:
                assert explain(mapping[2 * MiB : 2 * MiB + 8192], 7, 2 * MiB) is None
                assert explain(mapping[:], 7, 0) is None


def test_a_replaced_file(source: Path, start: Start) -> None:
    write_file(source / "file", 1, 100)
    write_file(source / "other", 2, 200)
    slow = start(attr_timeout=0)
    with open(slow.mountpoint / "file", "rb", buffering=0) as held:
        os.replace(source / "other", source / "file")
        assert explain(held.read(), 1, 0) is None
        assert os.fstat(held.fileno()).st_size == 100
    assert os.stat(slow.mountpoint / "file").st_size == 200
    assert explain(read_all(slow.mountpoint / "file"), 2, 0) is None
    with open(source / "file", "ab") as file:
        file.write(b"more")
    assert os.stat(slow.mountpoint / "file").st_size == 204


@pytest.mark.slow
def test_latency_is_for_each_operation_and_side_by_side(source: Path, start: Start) -> None:
    paths = []
    for number in range(8):
        write_file(source / f"{number}", number, 100)
        paths.append(f"{number}")
    latency = 0.05
    slow = start(latency=latency)
    os.stat(slow.mountpoint)

    began = time.monotonic()
    read_all(slow.mountpoint / paths[0])  # LOOKUP, OPEN, READ, READ
    alone = time.monotonic() - began
    assert alone >= 4 * latency

    threads = [threading.Thread(target=read_all, args=(slow.mountpoint / path,)) for path in paths[1:]]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = time.monotonic() - began
    assert 4 * latency <= together < len(threads) * 4 * latency / 2

    slow.set(latency=0)
    began = time.monotonic()
    for path in paths:
        read_all(slow.mountpoint / path)
    assert time.monotonic() - began < alone


@pytest.mark.slow
def test_bandwidth_is_shared(source: Path, start: Start) -> None:
    for number in range(2):
        write_file(source / f"{number}", number, 4 * MiB)
    slow = start(bandwidth=20_000_000)
    errors: list[str | None] = []
    threads = [
        threading.Thread(target=lambda n=number: errors.append(explain(read_all(slow.mountpoint / f"{n}"), n, 0)))
        for number in range(2)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowly = time.monotonic() - began
    assert errors == [None, None]
    assert slowly >= 8 * MiB / 20e6 - 0.01  # less than the burst

    slow.set(bandwidth=0)
    began = time.monotonic()
    read_all(slow.mountpoint / "0")
    read_all(slow.mountpoint / "1")
    assert time.monotonic() - began < slowly / 2


def test_a_killed_reader_ends_at_once(source: Path, start: Start) -> None:
    write_file(source / "file", 1, 100)
    slow = start()
    os.stat(slow.mountpoint / "file")
    slow.set(latency=60)
    for command, name in (("cat", "file"), ("stat", "missing")):
        slow.reset()
        with subprocess.Popen([command, slow.mountpoint / name], stdout=subprocess.DEVNULL) as reader:
            wait_until(lambda: slow.counters() != Counters(), 10, "the reader has asked")
            reader.kill()
            assert reader.wait(10) == -signal.SIGKILL
    slow.set(latency=0)
    assert explain(read_all(slow.mountpoint / "file"), 1, 0) is None


def test_stop_of_a_busy_mount(source: Path, start: Start) -> None:
    write_file(source / "file", 1, 100)
    slow = start()
    held = os.open(slow.mountpoint / "file", os.O_RDONLY)
    slow.stop()
    assert mounting.find_mount(str(slow.mountpoint)) is None
    with pytest.raises(OSError, match="not connected"):
        os.read(held, 1)
    with contextlib.suppress(OSError):  # the descriptor is closed all the same
        os.close(held)


def test_it_ends_when_it_is_unmounted(start: Start) -> None:
    slow = start()
    mounting.unmount(str(slow.mountpoint))
    wait_until(lambda: slow.poll() is not None, 10, "slowfs has ended")
    assert slow.poll() == 0


def test_a_killed_one_leaves_a_dead_mount(start: Start) -> None:
    slow = start()
    slow.kill()
    with pytest.raises(OSError, match="not connected") as caught:
        os.stat(slow.mountpoint)
    assert caught.value.errno == errno.ENOTCONN
    slow.stop()
    assert os.listdir(slow.mountpoint) == []


def test_control_refuses_nonsense(start: Start) -> None:
    slow = start()
    with pytest.raises(SlowFsError, match="unknown op 'dance'"):
        slow.request(op="dance")
    with pytest.raises(SlowFsError, match="could not convert"):
        slow.request(op="set", latency_ms="much")
    assert slow.counters().opens == 0


@pytest.mark.slow
def test_command_line_in_the_background(source: Path, tmp_path: Path) -> None:
    write_file(source / "file", 1, 64 * KiB)
    mountpoint, control = tmp_path / "slow", tmp_path / "control"
    mountpoint.mkdir()
    command = [sys.executable, PROGRAM, "--latency", "1", "--control", control, source, mountpoint]
    done = subprocess.run(
        [str(word) for word in command], cwd="/", capture_output=True, text=True, timeout=30, check=False
    )
    try:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert explain(read_all(mountpoint / "file"), 1, 0) is None
        assert control.stat().st_mode & 0o777 == 0o600
    finally:
        mounting.unmount(str(mountpoint))
    wait_until(lambda: not control.exists(), 10, "slowfs has ended")


@pytest.mark.slow
def test_command_line_mistakes(source: Path, tmp_path: Path) -> None:
    inside = source / "inside"
    inside.mkdir()
    for arguments, code, words in (
        ([source, inside], 5, "lie in each other"),
        ([tmp_path / "missing", inside], 2, "does not exist"),
        (["--latency", "slow", source, inside], 2, "not a valid float"),
    ):
        command = [sys.executable, str(PROGRAM), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == code
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert mounting.find_mount(str(inside)) is None
