"""The promises of docs/semantics.md, each in one short run of a real mount, under the promise's own name.

The corners of each are in the POSIX suite, in tests/faults, tests/model and tests/operations; this is the list to
begin with.
"""

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.doubles.badsrc import BadSource
from tests.faults.conftest import bad_source  # noqa: F401  (a fixture)
from tests.support.files import expect_content, make_files, write_file
from tests.support.mounts import WAYS, MountFactory, is_mounted
from tests.support.waiting import wait_until

KiB = 1024
MiB = 1024 * KiB


@pytest.fixture
def watched(bad_source: Callable[..., BadSource], tmp_path: Path) -> Iterator[tuple[Path, BadSource]]:  # noqa: F811
    """A data set of four files, and the counting source before it."""
    folder = tmp_path / "set"
    make_files(folder, [100 * KiB, 1, 6 * MiB, 9 * MiB + 1])
    return folder, bad_source(folder)


@pytest.mark.parametrize("way", WAYS)
def test_bytes(watched: tuple[Path, BadSource], dmfs_mount: MountFactory, way: str) -> None:
    """Promise 1: the bytes of the version opened, whatever the offset and size, and never of two."""
    folder, source = watched
    mount = dmfs_mount(source.mountpoint, way=way, immutable=False, flags=["--metadata-ttl", "0"])
    rng = random.Random(1)
    for number, path in enumerate(sorted(mount.view.iterdir())):
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            for _ in range(40):
                offset, length = rng.randrange(size + 10), rng.randrange(1, 3 * MiB)
                expect_content(
                    os.pread(file.fileno(), length, offset), number, offset, max(0, min(length, size - offset))
                )
    name = mount.view / "00002.bin"
    with name.open("rb", buffering=0) as old:
        write_file(folder / "new", 2, 6 * MiB, version=1)
        os.rename(folder / "new", folder / "00002.bin")
        new_ino = (folder / "00002.bin").stat().st_ino
        wait_until(lambda: name.stat().st_ino == new_ino, 5, "the source's own attribute cache has expired")
        expect_content(name.read_bytes(), 2, 0, 6 * MiB, version=1)
        expect_content(os.pread(old.fileno(), 6 * MiB, 0), 2, 0, 6 * MiB)


def test_errors(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 2: only the source's own error reaches a reader, and only its ENOENT makes a name go away."""
    _, source = watched
    mount = dmfs_mount(source.mountpoint, immutable=False, flags=["--metadata-ttl", "0"])
    held = mount.view / "00000.bin"
    expect_content(held.read_bytes(), 0, 0, 100 * KiB)
    mount.wait_fills_done()
    source.rule(error=errno.EIO)
    expect_content(held.read_bytes(), 0, 0, 100 * KiB)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (mount.view / "no such name").stat()
    source.clear()
    with pytest.raises(FileNotFoundError):
        (mount.view / "no such name").stat()


def test_read_only(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 3: the answers of a native read-only mount; tests/mount/posix has the whole table."""
    folder, source = watched
    view = dmfs_mount(source.mountpoint).view
    for attempt in (
        lambda: (view / "00000.bin").open("r+b"),
        lambda: (view / "new").write_bytes(b""),
        lambda: (view / "00000.bin").unlink(),
        lambda: (view / "folder").mkdir(),
        lambda: os.utime(view / "00000.bin"),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            attempt()
    assert os.statvfs(view).f_flag & os.ST_RDONLY
    here, there = (view / "00003.bin").stat(), (folder / "00003.bin").stat()
    assert (here.st_ino, here.st_size, here.st_mode, here.st_blocks) == (
        there.st_ino,
        there.st_size,
        there.st_mode,
        there.st_blocks,
    )


def test_once(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 4: each source byte is read once, by however many readers, and not at all after a restart."""
    folder, source = watched
    mount = dmfs_mount(source.mountpoint)
    names = sorted(os.listdir(folder))
    total = sum(path.stat().st_size for path in folder.iterdir())

    def read_all() -> None:
        for name in random.sample(names, len(names)):
            expect_content((mount.view / name).read_bytes(), int(name[:5]), 0, (folder / name).stat().st_size)

    readers = [threading.Thread(target=read_all) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    mount.wait_fills_done()
    counters = source.counters()
    assert (counters.bytes, counters.opens) == (total, len(names))
    mount.remount()
    read_all()
    assert (source.counters().bytes, source.counters().opens) == (total, len(names))


def test_time(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 5: a source that hangs stops only those who need it, a killed reader leaves, and an unmount ends."""
    _, source = watched
    mount = dmfs_mount(source.mountpoint, expects_trouble=True)
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, 100 * KiB)
    names = sorted(os.listdir(mount.view))
    source.rule("READ", "00003.bin", hangs=True)
    reader = subprocess.Popen(["cat", mount.view / "00003.bin"], stdout=subprocess.DEVNULL)
    try:
        wait_until(source.hanging, 5, "the source hangs")
        waiting = wait_until(lambda: mount.status()["waiting"], 5, "the status tells")
        assert waiting[0]["path"] == "00003.bin"
        assert sorted(os.listdir(mount.view)) == names
        expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, 100 * KiB)
        reader.kill()
        reader.wait(5)
        mount.umount("--force")
    finally:
        source.clear()
        reader.kill()
        reader.wait(5)


def test_resources(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 6: descriptors come back, and the status says what du says."""
    _, source = watched
    mount = dmfs_mount(source.mountpoint)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{mount.pid}/fd"))

    def read_all() -> None:
        for path in mount.view.iterdir():
            path.read_bytes()

    read_all()
    mount.wait_fills_done()
    before = wait_until(descriptors, 5, "the daemon lives")
    files = [(mount.view / "00003.bin").open("rb") for _ in range(50)]
    for file in files:
        file.close()
    read_all()
    wait_until(lambda: descriptors() <= before, 5, f"the daemon has its {before} descriptors again")
    on_disk = sum(path.stat().st_blocks * 512 for path in mount.base.glob("cache/*/objects/*-*"))
    used = mount.status()["tiers"][0]["used_bytes"]
    assert abs(used - on_disk) <= on_disk / 100


def test_fresh(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 7: a change at the source is seen by the next open within the metadata TTL."""
    folder, source = watched
    mount = dmfs_mount(source.mountpoint, immutable=False, flags=["--metadata-ttl", "1"])
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, 100 * KiB)
    assert not (mount.view / "00009.bin").exists()
    write_file(folder / "00000.bin", 0, 120 * KiB, version=1)
    write_file(folder / "00009.bin", 9, 10)
    # One second of ours, one of the source's own attribute cache, and time to spare.
    wait_until(lambda: (mount.view / "00000.bin").stat().st_size == 120 * KiB, 8, "the new size is seen")
    wait_until((mount.view / "00009.bin").exists, 8, "the new name is seen")
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, 120 * KiB, version=1)


def test_mount(watched: tuple[Path, BadSource], dmfs_mount: MountFactory) -> None:
    """Promise 8: mount returns when the mount works, or fails with one sentence and its exit code."""
    _, source = watched
    mount = dmfs_mount(source.mountpoint)
    expect_content((mount.view / "00001.bin").read_bytes(), 1, 0, 1)
    again = mount.command(*mount.mount_arguments())
    assert again.returncode == 5
    assert again.stderr.startswith(f"dmfs: {mount.view} is already mounted")
    assert len(again.stderr.splitlines()) == 1
    mount.umount()
    assert not is_mounted(mount.view)
    missing = mount.command("mount", str(mount.base / "nowhere"), str(mount.view))
    assert (missing.returncode, len(missing.stderr.splitlines())) == (4, 1)
