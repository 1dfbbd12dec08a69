"""While one reader waits for a slow or hanging source, everybody else is served: cases D05, D06, and promise 5."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.files import KiB, MiB, expect_content, make_files
from tests.support.mounts import WAYS, MountFactory
from tests.support.waiting import wait_until

WARM, COLD = 10, 110  # files 0 to 9 are read beforehand, 10 to 109 are only looked at
BIG = COLD
LIMIT = 1.0  # seconds: "well under a second", and then some for a busy machine


@contextmanager
def reading(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads a file from start to end, killed after the block if it is not done."""
    process = subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


EVERYDAY = """
import json, os, sys, time
view, warm, cold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
took = {}
def timed(name, operation, *arguments):
    start = time.monotonic()
    operation(*arguments)
    took[name] = time.monotonic() - start
def read(path):
    with open(path, "rb") as file:
        assert len(file.read()) == 4096, path
for number in range(warm, cold):
    timed(f"stat {number}", os.stat, f"{view}/{number:05d}.bin")
timed("listing", os.listdir, view)
timed("statvfs", os.statvfs, view)
for number in range(warm):
    timed(f"read {number}", read, f"{view}/{number:05d}.bin")
print(json.dumps(took))
"""


def everyday_operations(view: Path) -> tuple[float, str]:
    """Seconds and name of the slowest of 100 stats of files not looked at before, a listing, a statvfs, 10 warm reads.

    In a process of their own, as one that hangs in a mount can only be killed.
    """
    command = [sys.executable, "-c", EVERYDAY, str(view), str(WARM), str(COLD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    assert len(took) == COLD + 2
    return max((seconds, name) for name, seconds in took.items())


def read_within(path: Path, seconds: float) -> bytes:
    """The content of a file, read by a process that is killed if it takes longer."""
    try:
        return subprocess.run(["cat", path], capture_output=True, timeout=seconds, check=True).stdout
    except subprocess.TimeoutExpired:
        raise AssertionError(f"reading {path.name} took longer than {seconds:g} s") from None


def beside_a_slow_read(mount_source: Callable, dmfs_mount: MountFactory, folder: Path, way: str, size: int) -> None:
    make_files(folder, [4 * KiB] * COLD + [size])
    source = mount_source(folder)
    mount = dmfs_mount(source.mountpoint, way=way)
    for number in range(WARM):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, 4 * KiB)
    mount.wait_fills_done()
    source.set(bandwidth=1 * MiB)
    with reading(mount.view / f"{BIG:05d}.bin") as reader:
        wait_until(lambda: mount.status()["waiting"], 20, "the large file is waited for")
        longest, what = everyday_operations(mount.view)
        assert reader.poll() is None, "the slow read has ended, so this shows nothing"
        assert longest < LIMIT, f"{what} took {longest:.2f} s"
        (waiting,) = [w for w in mount.status()["waiting"] if w["path"].endswith(f"{BIG:05d}.bin")]
        assert waiting["age_s"] >= 0
    assert mount.status()["waiting"], "no call waits for the source any more, so the next line shows nothing"
    start = time.monotonic()
    mount.umount()
    assert time.monotonic() - start < 3, "unmounting waited for the slow source"


@pytest.mark.parametrize("way", WAYS)
def test_everyday_operations_beside_a_slow_read(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, way: str
) -> None:
    beside_a_slow_read(bad_source, dmfs_mount, tmp_path / "set", way, 32 * MiB)


@pytest.mark.full
def test_everyday_operations_beside_a_slow_read_of_200_mib(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory
) -> None:
    beside_a_slow_read(bad_source, dmfs_mount, tmp_path / "set", "auto", 200 * MiB)


def test_hanging_reads_leave_the_rest_alone(tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory) -> None:
    """More abandoned reads than there are data threads; then a listing, a warm read and a cold read (D05)."""
    threads = 4
    make_files(tmp_path / "set", [4 * KiB] * 20)
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint, env={"DMFS_DATA_THREADS": str(threads)})
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, 4 * KiB)
    hanging = [f"{number:05d}.bin" for number in range(1, threads + 2)]
    for name in hanging:
        source.rule("READ", name, hangs=True)
    readers = [subprocess.Popen(["cat", mount.view / name], stdout=subprocess.DEVNULL) for name in hanging]
    wait_until(lambda: source.hanging() >= threads, 10, "the reads hang")
    for reader in readers:
        reader.kill()
    for reader in readers:
        reader.wait(10)
    listing = subprocess.run(["ls", mount.view], capture_output=True, text=True, timeout=LIMIT)
    assert len(listing.stdout.split()) == 20
    expect_content(read_within(mount.view / "00000.bin", LIMIT), 0, 0, 4 * KiB)
    expect_content(read_within(mount.view / "00015.bin", 10), 15, 0, 4 * KiB)
    source.clear()
    wait_until(lambda: not mount.status()["waiting"], 10, "nothing is waited for any more")


@pytest.mark.parametrize("way", WAYS)
def test_umount_beside_an_abandoned_read(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, way: str
) -> None:
    """The reader is killed, the call at the source hangs on: nobody uses the mount, so the plain unmount ends."""
    make_files(tmp_path / "set", [9 * MiB])
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint, way=way)
    source.rule("READ", hangs=True)
    with reading(mount.view / "00000.bin"):
        wait_until(lambda: source.hanging(), 10, "the read hangs")
    start = time.monotonic()
    mount.umount()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("way", WAYS)
def test_forced_umount_of_a_hanging_source(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, way: str
) -> None:
    make_files(tmp_path / "set", [9 * MiB])  # so large that its open returns at once, and the reader hangs in a read
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint, way=way, expects_trouble=True)
    source.rule("READ", hangs=True)
    with reading(mount.view / "00000.bin") as reader:
        wait_until(lambda: source.hanging(), 10, "the read hangs")
        done = mount.command("umount", str(mount.view))
        assert done.returncode == 9, f"a busy mount was unmounted, or the reason is another: {done}"
        assert str(reader.pid) in done.stderr, f"the reader is not named: {done.stderr}"
        start = time.monotonic()
        done = mount.command("umount", str(mount.view), "--force", timeout=20)
        assert time.monotonic() - start < 15
        assert done.returncode in (0, 10), done
        assert reader.wait(5) != 0
    source.clear()
    wait_until(lambda: not mount.is_alive(), 10, "the daemon is gone once the source answers")
