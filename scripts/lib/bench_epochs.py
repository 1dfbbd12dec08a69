"""Epochs over a slow source: what the first reading through dmfs costs, and that later ones cost the source nothing.

`direct` reads the slow file system itself, `dmfs` a mount over it with an empty cache. Each has a slow file system
freshly mounted for it, so that no name or attribute of either is in a kernel cache at the start. What the source was
asked for is counted by the slow file system, not by dmfs.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.lib import dataset
from scripts.lib.bench_report import Report
from scripts.lib.dataset import Sample, total_bytes
from scripts.lib.mounts import DmfsMount, cpu_seconds
from scripts.lib.readers import ReaderPool, shuffled
from scripts.lib.slowfs_client import SlowFs

KiB = 1024
MiB = 1024 * KiB

LATENCY = 0.001  # seconds per operation, as a Lustre server answers on a quiet network
BANDWIDTH = 200_000_000  # bytes per second, shared by all
AGE = 864_000.0  # seconds the files look older than they are: a data set that has been lying there for ten days

BASE = "direct"


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of data set: `count` files of `size` bytes, read by `readers` processes, `request` bytes at a time."""

    count: int
    size: int
    readers: int
    request: int = MiB

    @property
    def name(self) -> str:
        """The case in words."""
        size = f"{self.size // MiB} MiB" if self.size >= MiB else f"{self.size // KiB} KiB"
        requests = "" if self.request == MiB else f" in {self.request // KiB} KiB reads"
        return f"{self.count:,} x {size}{requests}, {self.readers} reader{'s' * (self.readers > 1)}"


CASES = {
    "small": Case(count=2000, size=110 * KiB, readers=4),
    "buffered": Case(count=2000, size=110 * KiB, readers=4, request=64 * KiB),
    "large": Case(count=8, size=100 * MiB, readers=4),
    "single": Case(count=8, size=100 * MiB, readers=1),
}
"""What is measured.

Many small files, each in one read, the least that any program can ask for; the same a buffer at a time, as image
loaders read; few large ones; and these by one reader alone.
"""

QUICK = {
    "small": Case(count=200, size=110 * KiB, readers=4),
    "buffered": Case(count=200, size=110 * KiB, readers=4, request=64 * KiB),
    "large": Case(count=8, size=10 * MiB, readers=4),
    "single": Case(count=8, size=10 * MiB, readers=1),
}


def run(work: Path, report: Report, *, rounds: int, chosen: list[Case]) -> Iterator[str]:
    """Measure into `report`; yields what it does next, for a progress display. Leaves only caches in `work`."""
    for case in chosen:
        yield f"{case.name}: making the files"
        source = work / "source"
        samples = dataset.make_plain(source, count=case.count, size=case.size)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, source, ignore_errors=True)
            pool = stack.enter_context(ReaderPool(case.readers))
            for number in range(rounds):
                yield f"{case.name}: round {number + 1} of {rounds}"
                turns = [_direct, _dmfs]
                if number % 2:
                    turns.reverse()
                for turn in turns:
                    turn(work, report, case, samples, pool, number)


def _slow(work: Path) -> SlowFs:
    return SlowFs(work / "source", work / "slow", latency=LATENCY, bandwidth=BANDWIDTH, age=AGE)


def _direct(work: Path, report: Report, case: Case, samples: list[Sample], pool: ReaderPool, number: int) -> None:
    """The base: one epoch straight from the slow file system."""
    paths = shuffled([sample.path for sample in samples], epoch=number)
    with _slow(work) as slow:
        epoch = pool.read(slow.mountpoint, paths, request_size=case.request)
        report.add(case.name, BASE, epoch.seconds, unit="s")
        report.check(f"{case.name}, direct: bytes read", expected=total_bytes(samples), found=slow.counters().bytes)


def _dmfs(work: Path, report: Report, case: Case, samples: list[Sample], pool: ReaderPool, number: int) -> None:
    """Two epochs through dmfs with an empty cache, a restart, and a third."""
    paths = [sample.path for sample in samples]
    # A folder of its own for each round, and none removed before the end: for a minute and more after files were
    # deleted ext4 steps over each of their inodes whenever it makes a new one, which would be measured with the rest.
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=work))
    with _slow(work) as slow, DmfsMount(slow.mountpoint, work / "mnt", cache) as mount:
        seen = slow.counters()
        for epoch_number, label in enumerate(("epoch 1", "epoch 2", "after restart"), 1):
            if label == "after restart":
                mount.unmount()
                mount.mount()
                mount.wait_idle()
            before = cpu_seconds(mount.pid)
            order = shuffled(paths, epoch=number * epoch_number)
            epoch = pool.read(mount.mountpoint, order, request_size=case.request, drop_pages=True)
            cpu = (cpu_seconds(mount.pid) - before) / epoch.seconds
            mount.wait_idle()
            report.add(case.name, f"dmfs, {label}", epoch.seconds, unit="s", cpu=cpu)
            now = slow.counters()
            wanted = total_bytes(samples) if epoch_number == 1 else 0
            report.check(f"{case.name}, {label}: source bytes", expected=wanted, found=now.bytes - seen.bytes)
            if epoch_number > 1:
                report.check(f"{case.name}, {label}: source opens", expected=0, found=now.opens - seen.opens)
            seen = now
