"""Warm reads: how fast a mount gives what lies on the local disk already, against a bare pyfuse3 loop-back file system.

dmfs's kernel front end answers by messages here (`--io plain`), as the loop-back does; what else it can is part of
`bench_compare.py`.

The bytes are in the page cache below every variant (the source's files for `native` and `loopback`, dmfs's copies for
dmfs), so that the path through the file system is measured and not the disk. Every variant is mounted anew for each
round: nothing is in the page cache of the mount itself at first. Small files are read `first` in two halves: one whose
names nobody has looked up before, and one where each file was stat'ed, as a framework does that lists its data set.
`again` is all of them once more, which the kernel may serve from the mount's pages.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.lib import dataset
from scripts.lib.bench_report import Report
from scripts.lib.mounts import DmfsMount, cpu_seconds, loopback
from scripts.lib.readers import ReaderPool, shuffled

Variant = Literal["loopback", "native", "kernel", "pyfuse3"]
VARIANTS: tuple[Variant, ...] = ("loopback", "native", "kernel", "pyfuse3")
NAMES: dict[Variant, str] = {
    "loopback": "pyfuse3 loop-back",
    "native": "native",
    "kernel": "dmfs, kernel",
    "pyfuse3": "dmfs, pyfuse3",
}
READERS = (1, 4)

KiB = 1024
MiB = 1024 * KiB


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read: `large` files of `large_size` bytes and `small` files of 110 KiB."""

    large: int
    large_size: int
    small: int


FULL = Sizes(large=16, large_size=100 * MiB, small=5000)
QUICK = Sizes(large=4, large_size=16 * MiB, small=500)
SMALL_SIZE = 110 * KiB


def run(work: Path, report: Report, *, rounds: int, sizes: Sizes, variants: Sequence[Variant]) -> Iterator[str]:
    """Measure into `report`; yields what it does next, for a progress display. Leaves nothing in `work`."""
    yield "making the files"
    source = work / "source"
    large = dataset.make_plain(source / "large", count=sizes.large, size=sizes.large_size)
    small = dataset.make_plain(source / "small", count=sizes.small, size=SMALL_SIZE)
    large_paths = [f"large/{sample.path}" for sample in large]
    small_paths = [f"small/{sample.path}" for sample in small]
    cache = work / "cache"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, cache, ignore_errors=True)
        stack.callback(shutil.rmtree, source, ignore_errors=True)
        pools = {readers: stack.enter_context(ReaderPool(readers)) for readers in READERS}
        if "kernel" in variants or "pyfuse3" in variants:
            yield "filling dmfs's cache"
            with DmfsMount(source, work / "mnt", cache) as mount:
                pools[4].read(mount.mountpoint, large_paths + small_paths)
                mount.wait_idle(copies=len(large_paths) + len(small_paths))
        for number in range(rounds):
            order = shuffled(small_paths, epoch=number)
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                for readers, pool in pools.items():
                    by = f"{readers} reader{'s' * (readers > 1)}"
                    yield f"round {number + 1} of {rounds}: {NAMES[variant]}, {by}"
                    with _mounted(variant, source, work / "mnt", cache, report) as (root, pid):
                        meter = _Meter(report, NAMES[variant], by, root, pid, pool)
                        meter.read(f"{sizes.large} x {sizes.large_size // MiB} MiB", large_paths)
                        unknown, known = order[::2], order[1::2]
                        meter.read(f"{len(unknown):,} x 110 KiB, first", unknown)
                        for path in known:
                            os.stat(root / path)
                        meter.read(f"{len(known):,} x 110 KiB, first, names known", known)
                        meter.read(f"{len(order):,} x 110 KiB, again", order)


@dataclass(frozen=True, slots=True)
class _Meter:
    """Reads with one pool over one mount, and puts what it took into the report."""

    report: Report
    variant: str
    by: str
    root: Path
    pid: int | None
    pool: ReaderPool

    def read(self, case: str, paths: list[str]) -> None:
        """Read the files once, and add it to the report under `case`."""
        before = cpu_seconds(self.pid) if self.pid else 0
        epoch = self.pool.read(self.root, paths)
        cpu = (cpu_seconds(self.pid) - before) / epoch.seconds if self.pid else None
        if "MiB" in case:
            value, unit = epoch.bytes_per_second / 1e9, "GB/s"
        else:
            value, unit = epoch.files_per_second, "files/s"
        self.report.add(f"{case}, {self.by}", self.variant, value, unit=unit, cpu=cpu)


@contextmanager
def _mounted(
    variant: Variant, source: Path, mountpoint: Path, cache: Path, report: Report
) -> Iterator[tuple[Path, int | None]]:
    """The variant's root directory and the pid of its process. Checks afterwards that dmfs read all from its cache."""
    if variant == "native":
        yield source, None
    elif variant == "loopback":
        with loopback(source, mountpoint) as pid:
            yield mountpoint, pid
    else:
        io = "plain" if variant == "kernel" else None
        with DmfsMount(source, mountpoint, cache, front_end=variant, io=io) as mount:
            mount.wait_idle()
            yield mountpoint, mount.pid
            name = f"{NAMES[variant]}: bytes read from the source"
            report.check(name, expected=0, found=mount.status()["source"]["bytes"])
