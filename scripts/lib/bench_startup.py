"""Start-up: how long `dmfs mount` takes where a cache holds many copies, and how long it counts them behind it.

The mount must answer without waiting for the count. Its time with an empty cache stands beside it, as the base.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dmfs.tiers.store import copy_name
from scripts.lib import dataset
from scripts.lib.bench_report import Report
from scripts.lib.mounts import DmfsMount
from scripts.lib.readers import ReaderPool

COPIES = 200_000
COPIES_QUICK = 5_000
COPY_SIZE = 512  # bytes: takes one block of the disk, like any small copy

BASE = "empty cache"


def run(work: Path, report: Report, *, rounds: int, copies: int) -> Iterator[str]:
    """Measure into `report`; yields what it does next, for a progress display. Leaves nothing in `work`."""
    source = work / "source"
    paths = [sample.path for sample in dataset.make_plain(source, count=1, size=COPY_SIZE)]
    with ExitStack() as stack:
        for folder in ("cache", "empty"):
            stack.callback(shutil.rmtree, work / folder, ignore_errors=True)
        stack.callback(shutil.rmtree, source, ignore_errors=True)
        yield f"making {copies:,} copies"
        pool = stack.enter_context(ReaderPool(1))
        with DmfsMount(source, work / "mnt", work / "cache") as mount:
            pool.read(mount.mountpoint, paths)
            mount.wait_idle(copies=1)
        _add_copies(work / "cache", copies - 1)
        for number in range(rounds):
            yield f"round {number + 1} of {rounds}"
            shutil.rmtree(work / "empty", ignore_errors=True)
            with DmfsMount(source, work / "mnt", work / "empty") as mount:
                report.add("dmfs mount", BASE, mount.mount_seconds, unit="s")
            with DmfsMount(source, work / "mnt", work / "cache") as mount:
                mounted = time.monotonic()
                report.add("dmfs mount", f"{copies:,} copies", mount.mount_seconds, unit="s")
                began = time.monotonic()
                pool.read(mount.mountpoint, paths)
                report.add(
                    "first file, read at once after it", f"{copies:,} copies", time.monotonic() - began, unit="s"
                )
                mount.wait_idle()
                # From the command's return: the count began a little earlier, in the daemon.
                report.add("all copies counted, after it", f"{copies:,} copies", time.monotonic() - mounted, unit="s")
                found = sum(tier["copies"] for tier in mount.status()["tiers"])
                report.check("copies found", expected=copies, found=found)
                report.check("bytes read from the source", expected=0, found=mount.status()["source"]["bytes"])


def _add_copies(cache: Path, count: int) -> None:
    """Put copies of files that are in no source into the one folder of a data set that `cache` has."""
    (objects,) = cache.glob("*/objects")
    content = bytes(COPY_SIZE)
    folder = os.open(objects, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(count):
            name = copy_name(number.to_bytes(16, "big"), number)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            os.write(fd, content)
            os.close(fd)
    finally:
        os.close(folder)
