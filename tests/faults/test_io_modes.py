"""Passthrough, pagecache and plain under load: all ways of opening mixed, copies given up, the source changing; and
what ten thousand files open at once leave behind.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.doubles import storm
from tests.support.files import KiB, MiB, expect_content, make_files, write_file
from tests.support.mounts import WAYS, DmfsMount, MountFactory, tmpfs, why_no_bind_mounts
from tests.support.ordered_daemon import OrderedMount
from tests.support.waiting import wait_until

OWN_WAYS = [way for way in WAYS if way != "pyfuse3"]
SIZES = [5000, 300 * KiB + 7, 2 * MiB, 9 * MiB, 12 * MiB + 4097]  # the last two are opened before they are here
BANDWIDTH = 150_000_000  # bytes per second of the slowed source: a large file is on its way for a tenth of a second
PACE = 0.03  # seconds between two disturbances of a storm
KINDS = {
    # A page fault that finds its version gone is a SIGBUS, which where no open is seen happens to who did no wrong.
    "pagecache": "pread,seek,readv,direct",
}


def replace(path: Path, number: int, size: int, version: int) -> None:
    """A new version under the name, as tools write them: whole, and renamed."""
    new = path.with_name(f"{path.name}.new")
    write_file(new, number, size, version)
    new.rename(path)


def storm_over(view: Path, disturb: Callable[[int], None], **options: object) -> storm.Report:
    """A storm, and `disturb(round)` again and again until it is over."""
    with ThreadPoolExecutor(1) as pool:
        running: Future[storm.Report] = pool.submit(storm.run, view, **options)
        rounds = 0
        while not wait([running], PACE).done:
            rounds += 1
            disturb(rounds)
        report = running.result()
    assert rounds >= 5, "the storm was over before anything disturbed it"
    return report


def mixed_storm(
    tmp_path: Path, bad_source: Callable, ordered_mount: Callable[..., OrderedMount], way: str, seconds: float
) -> None:
    paths = make_files(tmp_path / "set", SIZES)
    source = bad_source(tmp_path / "set", bandwidth=BANDWIDTH, attr_timeout=0)
    mount = ordered_mount(source.mountpoint, way=way, immutable=False, flags=["--metadata-ttl", "0"])
    evicted = 0

    def disturb(count: int) -> None:
        nonlocal evicted
        evicted += mount.order("evict", share=0.7, seed=count)["evicted"]
        if count % 5 == 0:
            number = count // 5 % len(paths)
            replace(paths[number], number, SIZES[number] + count * 10, count)

    report = storm_over(
        mount.view,
        disturb,
        processes=8,
        reads=1_000_000,
        seconds=seconds,
        timeout=seconds + 60,
        version="any",
        kinds=KINDS.get(way, ",".join(storm.KINDS)),
    )
    assert (report.wrong, report.died) == (0, 0), report
    assert evicted > 10, "hardly a copy was given up"
    assert report.versions >= 5, "no new version was seen"
    status = mount.status()
    assert status["surprises"] == 0, status["errors"]
    # Where opens are seen, who has a version open goes on with it.
    assert set(report.errors) <= ({"ESTALE"} if way == "pagecache" else set()), report.errors
    if way == "passthrough":
        served = status["served"]
        assert served["kernel"]["opens"] > 20, "hardly a file was handed over"
        assert served["source"]["reads"] > 20, "hardly a read was a message"
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    known = mount.status()["known"]
    assert known["backing_ids"] == known["backing_ids_idle"], "ids are held by nobody"


@pytest.mark.slow
@pytest.mark.parametrize("way", OWN_WAYS)
def test_fills_evictions_and_changes_at_once(
    tmp_path: Path, bad_source: Callable, ordered_mount: Callable[..., OrderedMount], way: str
) -> None:
    mixed_storm(tmp_path, bad_source, ordered_mount, way, seconds=2)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", OWN_WAYS)
def test_fills_evictions_and_changes_for_long(
    tmp_path: Path, bad_source: Callable, ordered_mount: Callable[..., OrderedMount], way: str
) -> None:
    mixed_storm(tmp_path, bad_source, ordered_mount, way, seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["rename", "in-place"])
@pytest.mark.parametrize("way", OWN_WAYS)
def test_two_versions_open_at_once(
    tmp_path: Path, ordered_mount: Callable[..., OrderedMount], way: str, change: str
) -> None:
    """Whoever had the old version open goes on with it, while a storm reads the new one by the same names."""
    paths = make_files(tmp_path / "set", SIZES)
    mount = ordered_mount(tmp_path / "set", way=way, immutable=False, flags=["--metadata-ttl", "0"])
    views = [mount.view / path.name for path in paths]
    for number, view in enumerate(views):
        expect_content(view.read_bytes(), number, 0, SIZES[number])
    mount.wait_fills_done()
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    held = [os.open(view, os.O_RDONLY) for view in views]
    try:
        for number, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
            change_file = replace if change == "rename" else write_file
            change_file(path, number, size + 100, 1)
        for view, size in zip(views, SIZES, strict=True):
            wait_until(lambda view=view, size=size: view.stat().st_size == size + 100, 5, "the new version is seen")

        def disturb(count: int) -> None:
            mount.order("evict", share=0.7, seed=count)
            number = count % len(held)
            os.posix_fadvise(held[number], 0, 0, os.POSIX_FADV_DONTNEED)
            offset = count * 77_777 % SIZES[number]
            length = min(200_000, SIZES[number] - offset)
            expect_content(os.pread(held[number], length, offset), number, offset, length)

        report = storm_over(mount.view, disturb, processes=4, reads=1_000_000, seconds=1.5, version=1)
        assert (report.wrong, report.died, report.errors) == (0, 0, {}), report
    finally:
        for fd in held:
            os.close(fd)
    status = mount.status()
    assert (status["surprises"], status["errors"]) == (0, [])


# ---- many files open


HOLDER = """
import json, os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
folder, count = sys.argv[1], int(sys.argv[2])
for line in sys.stdin:
    if line == "open\\n":
        fds = [os.open(f"{folder}/{n:05d}", os.O_RDONLY) for n in range(count)]
        wrong = [n for n, fd in enumerate(fds) if os.pread(fd, 100, 0) != b"%d" % n]
        print(json.dumps(wrong), flush=True)
    elif line == "close\\n":
        for fd in fds:
            os.close(fd)
        print("[]", flush=True)
    else:
        print("[]", flush=True)
        break
"""


def resident(mount: DmfsMount) -> int:
    """Bytes of memory of the daemon."""
    for line in Path(f"/proc/{mount.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def descriptors(mount: DmfsMount) -> int:
    """Of the daemon."""
    return len(os.listdir(f"/proc/{mount.pid}/fd"))


def tell(holder: "subprocess.Popen[str]", what: str) -> None:
    """Have the reader do something, and wait until it is done."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(what + "\n")
    assert json.loads(holder.stdout.readline()) == [], "wrong bytes"


def many_open(tmp_path: Path, ordered_mount: Callable[..., OrderedMount], count: int) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05d}").write_bytes(b"%d" % number)
    tier = tmp_path / "tier"
    mount = ordered_mount(folder, way="passthrough", caches=[tier / "cache"])
    empty = os.statvfs(tier).f_bfree

    def settled() -> bool:
        known = mount.status()["known"]
        return known["files_open"] == 0 and known["backing_ids"] == known["backing_ids_idle"] == count

    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(mount.view), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def open_and_close_all() -> int:
        """Returns the daemon's descriptors while all are open."""
        tell(holder, "open")
        known = mount.status()["known"]
        assert known["files_open"] == count
        assert known["backing_ids"] - known["backing_ids_idle"] == count
        assert mount.order("pins") == count
        assert mount.order("evict") == {"evicted": 0, "left": count}, "copies that are open were given up"
        meanwhile = descriptors(mount)
        tell(holder, "close")
        wait_until(settled, 5, "all handles are given back")
        assert mount.order("pins") == 0
        return meanwhile

    with holder:
        open_and_close_all()
        before, memory = descriptors(mount), resident(mount)
        assert open_and_close_all() <= before + 4, "descriptors for files that the kernel has open"
        assert descriptors(mount) <= before + 4, "descriptors pile up"
        assert resident(mount) <= memory + 4 * MiB, "memory piles up"
        tell(holder, "end")
        assert holder.wait(5) == 0
    assert os.statvfs(tier).f_bfree <= empty - count
    assert mount.order("evict") == {"evicted": count, "left": 0}
    known = mount.status()["known"]
    assert (known["backing_ids"], known["backing_ids_idle"]) == (0, 0)
    wait_until(lambda: os.statvfs(tier).f_bfree >= empty, 5, "the space is free again")
    served = mount.status()["served"]["kernel"]
    assert served == {"opens": 2 * count, "file_bytes": 2 * sum(len(str(n)) for n in range(count))}


@pytest.mark.slow
@pytest.mark.skipif(why_no_bind_mounts() is not None, reason="a tmpfs needs root")
@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
def test_many_files_open_by_passthrough(tmp_path: Path, ordered_mount: Callable[..., OrderedMount], count: int) -> None:
    with tmpfs(tmp_path / "tier", "256m"):
        many_open(tmp_path, ordered_mount, count)


@pytest.mark.parametrize("way", WAYS)
def test_status_counts_what_the_kernel_got(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    (path,) = make_files(tmp_path / "set", [9 * MiB])
    mount = dmfs_mount(path.parent, way=way)
    view = mount.view / path.name
    with view.open("rb", buffering=0) as cold:  # before the copy is here: by messages
        expect_content(cold.read(9 * MiB), 0, 0, 9 * MiB)
        assert mount.wait_fills_done()["served"]["kernel"] == {"opens": 0, "file_bytes": 0}
        with view.open("rb", buffering=0):  # a second open follows the first
            assert mount.status()["served"]["kernel"]["opens"] == 0
    wait_until(lambda: mount.status()["known"]["files_open"] == 0, 5, "all handles are given back")
    for _ in range(3):
        expect_content(view.read_bytes(), 0, 0, 9 * MiB)
    wanted = {"opens": 3, "file_bytes": 27 * MiB} if way == "passthrough" else {"opens": 0, "file_bytes": 0}
    assert mount.status()["served"]["kernel"] == wanted
