"""A cache that is full, or fills up under a running copy, never costs a reader anything: case A08."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.files import KiB, MiB, expect_content, make_files
from tests.support.mounts import DmfsMount, MountFactory, tmpfs, why_no_bind_mounts
from tests.support.waiting import wait_until

NO_MIN_FREE = {"DMFS_MIN_FREE": "0"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    if reason := why_no_bind_mounts():
        pytest.skip(reason)
    with tmpfs(tmp_path / "disk", "16m") as disk:
        yield disk


def fill_up(disk: Path) -> Path:
    """Write a file until the disk is full."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MiB, 4 * KiB):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast


def assert_only_whole_copies(mount: DmfsMount, source: Path) -> None:
    """Every published copy has the content of some file of the source."""
    wanted = {_digest(path) for path in source.iterdir()}
    (cache,) = [Path(cache.rpartition(":")[0] if ":" in cache else cache) for cache in mount.caches]
    copies = [path for path in cache.glob("*/objects/*") if path.suffix != ".sums"]
    damaged = [path.name for path in copies if _digest(path) not in wanted]
    assert not damaged, f"published and not whole: {damaged}"


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()


def read_all_by_four(view: Path, sizes: list[int]) -> None:
    """Four threads read all files, each in another order, and check them."""
    problems: list[str] = []

    def reader(start: int) -> None:
        for step in range(len(sizes)):
            number = (start + step * 3) % len(sizes)
            try:
                expect_content((view / f"{number:05d}.bin").read_bytes(), number, 0, sizes[number])
            except (AssertionError, OSError) as exc:
                problems.append(str(exc))

    threads = [threading.Thread(target=reader, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, "\n".join(problems)
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"


def cached_again(mount: DmfsMount, sizes: list[int]) -> bool:
    """Read all files and see whether the last one has a copy by now."""
    before = len(mount.copies())
    read_all_by_four(mount.view, sizes)
    mount.wait_fills_done()
    return len(mount.copies()) > before


@pytest.mark.parametrize("said", ["", ":64MiB"], ids=["no-size", "size-larger-than-the-disk"])
def test_set_larger_than_the_disk(tmp_path: Path, small_disk: Path, dmfs_mount: MountFactory, said: str) -> None:
    sizes = [25 * MiB, *[2 * MiB + 500 * KiB] * 10]
    make_files(tmp_path / "set", sizes)
    mount = dmfs_mount(tmp_path / "set", caches=[f"{small_disk}/cache{said}"], env=NO_MIN_FREE)
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, sizes[0])

    def has_five() -> bool:
        # Once is not always enough: for a second after it was found full, a tier is left alone.
        read_all_by_four(mount.view, sizes)
        mount.wait_fills_done()
        return len(mount.copies()) >= 5

    wait_until(has_five, 10, "half of the files are cached")
    status = mount.status()
    assert_only_whole_copies(mount, tmp_path / "set")
    assert mount.leftovers() == []
    assert len(mount.copies()) >= 5, f"of ten files of 2.5 MiB, five and more fit into 16 MiB: {status['tiers']}"
    assert status["surprises"] == 0


def test_disk_full_before_and_space_later(tmp_path: Path, small_disk: Path, dmfs_mount: MountFactory) -> None:
    sizes = [1 * MiB] * 6
    make_files(tmp_path / "set", sizes)
    mount = dmfs_mount(tmp_path / "set", caches=[f"{small_disk}/cache"], env=NO_MIN_FREE)
    expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, sizes[0])
    mount.wait_fills_done()
    ballast = fill_up(small_disk)
    assert len(mount.copies()) == 1
    read_all_by_four(mount.view, sizes)
    os.listdir(mount.view)
    mount.wait_fills_done()
    assert len(mount.copies()) == 1, "copies were published on a full disk"
    mount.remount()
    read_all_by_four(mount.view, sizes)
    ballast.unlink()
    wait_until(lambda: cached_again(mount, sizes), 10, "files are cached again after space came back")
    assert_only_whole_copies(mount, tmp_path / "set")


def test_disk_fills_up_under_a_running_fill(
    tmp_path: Path, bad_source: Callable, small_disk: Path, dmfs_mount: MountFactory
) -> None:
    sizes = [13 * MiB, 1 * MiB, 1 * MiB]
    make_files(tmp_path / "set", sizes)
    source = bad_source(tmp_path / "set")
    source.rule("READ", "00000.bin", after=8 * MiB, hangs=True)
    mount = dmfs_mount(source.mountpoint, caches=[f"{small_disk}/cache"], env=NO_MIN_FREE)
    outcome: list[bytes] = []
    reader = threading.Thread(target=lambda: outcome.append((mount.view / "00000.bin").read_bytes()))
    reader.start()
    wait_until(lambda: mount.status()["fills"]["bytes"] >= 8 * MiB, 20, "8 MiB are written")
    ballast = fill_up(small_disk)
    source.clear()
    reader.join(30)
    assert outcome, "the reader got an error, or hangs"
    expect_content(outcome[0], 0, 0, sizes[0])
    mount.wait_fills_done()
    assert_only_whole_copies(mount, tmp_path / "set")
    for number in (1, 2):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, sizes[number])
    ballast.unlink()
    wait_until(lambda: cached_again(mount, sizes), 10, "files are cached again after space came back")
    assert_only_whole_copies(mount, tmp_path / "set")
    assert mount.leftovers() == []


@pytest.mark.full
def test_literal_sizes(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    if reason := why_no_bind_mounts():
        pytest.skip(reason)
    sizes = [100 * MiB, *[10 * MiB] * 10]
    make_files(tmp_path / "set", sizes)
    with tmpfs(tmp_path / "disk", "64m") as disk:
        mount = dmfs_mount(tmp_path / "set", caches=[f"{disk}/cache"], env=NO_MIN_FREE)
        expect_content((mount.view / "00000.bin").read_bytes(), 0, 0, sizes[0])
        read_all_by_four(mount.view, sizes)
        mount.wait_fills_done()
        assert_only_whole_copies(mount, tmp_path / "set")
        ballast = fill_up(disk)
        read_all_by_four(mount.view, sizes)
        ballast.unlink()
        mount.umount()
