"""dmfs in each I/O mode beside what a user would pick, all as ratios to the directory itself.

Every contestant keeps the files on the local disk, and they are in the page cache below it before each measurement, so
that the way through the file system is measured and not the disk. It is mounted anew for each group of files in each
round: `first` reads what is not in the pages of the mount itself yet, `again` is the same once more. A pass that is
over quickly is repeated, unless it is a first one, which cannot be; the value is that of the median pass, as what else
the machine does falls on some of them only. A contestant that is missing, fails or hangs is named and left out.
"""

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType

from scripts.lib import dataset
from scripts.lib.bench_compare_report import AGAIN, FIRST, CompareReport, case_name
from scripts.lib.contestants import Bindfs, Contestant, Dmfs, JuiceFs, Loopback, Native, NotInstalled, Rclone, Served
from scripts.lib.dataset import total_bytes
from scripts.lib.mounts import MountFailed, run_command, session_cpu_seconds
from scripts.lib.readers import PAGE_SIZE, ReaderPool, ReadError, shuffled

KiB = 1024
MiB = 1024 * KiB

SMALL_SIZE = 110 * KiB
LARGE, SMALL = "large", "small"  # folders of the data set
LARGE_SIZE = MiB  # what is not smaller belongs to a large file, also if it is only a part of one
PROBE = "probe"  # a file of the data set, read to see whether a mount answers

ENOUGH = 0.5  # seconds that the passes of one measurement take together, at least,
MOST_PASSES = 10  # unless there are so many
PASS_TIMEOUT = 120.0  # seconds; a pass that takes longer hangs
FILL_TIMEOUT = 600.0  # seconds for reading everything into an empty cache

DISK_FOLD = 6  # times the files: they themselves, dmfs's copies, rclone's, JuiceFS's objects and blocks, and some room
MEMORY_FOLD = 3  # times the files: what is below a mount, the pages of the mount, and some room

PUSHED = "dmfs, pagecache pushed"
"""The one that is told what will be read, and so has a first pass over small files and nothing else."""

CONTESTANTS: dict[str, Callable[[Path, Path], Contestant]] = {
    "native": Native,
    "passthrough": partial(Dmfs, name="dmfs, passthrough", io="passthrough"),
    "pagecache": partial(Dmfs, name="dmfs, pagecache", io="pagecache"),
    "pushed": partial(Dmfs, name=PUSHED, io="pagecache", pushes=True),
    "plain": partial(Dmfs, name="dmfs, plain", io="plain"),
    "pyfuse3": partial(Dmfs, name="dmfs, pyfuse3"),
    "loopback": Loopback,
    "bindfs": Bindfs,
    "rclone": Rclone,
    "juicefs": JuiceFs,
}
"""What can be compared, by the names of the command line: given the data set and a folder, a contestant."""

GOALS = {
    ("large", FIRST, "dmfs, passthrough"): 0.95,
    ("large", AGAIN, "dmfs, passthrough"): 0.95,
    ("large", FIRST, "dmfs, pagecache"): 0.15,
    ("mapped", FIRST, "dmfs, passthrough"): 0.9,
    ("mapped", AGAIN, "dmfs, passthrough"): 0.9,
    ("small", AGAIN, "dmfs, passthrough"): 0.35,
    ("small by 4", AGAIN, "dmfs, passthrough"): 0.6,
    ("small", AGAIN, "dmfs, pagecache"): 0.9,
    ("small by 4", AGAIN, "dmfs, pagecache"): 0.9,
    ("small", FIRST, PUSHED): 0.7,
    ("small by 4", FIRST, PUSHED): 0.7,
}
"""The ratios that dmfs is meant to reach with the full sizes, by group, pass and contestant."""


class NoRoom(Exception):
    """The machine is too small for figures that mean something. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read: `large` files of `large_size` bytes, `small` of 110 KiB; of a mapped file, `touches` pages."""

    large: int
    large_size: int
    small: int
    touches: int

    @property
    def groups(self) -> dict[str, str]:
        """The groups of files, in words, by their keys."""
        large = f"{self.large} x {self.large_size // MiB} MiB"
        small = f"{self.small:,} x {SMALL_SIZE // KiB} KiB"
        return {
            "large": f"{large}, 1 reader",
            "mapped": f"{large} mapped, random 4 KiB, 1 reader",
            "small": f"{small}, 1 reader",
            "small by 4": f"{small}, 4 readers",
        }


FULL = Sizes(large=16, large_size=100 * MiB, small=5000, touches=4000)
QUICK = Sizes(large=16, large_size=10 * MiB, small=500, touches=400)


@dataclass(frozen=True, slots=True)
class Group:
    """Files that are read in one way over one mount.

    Attributes:
        name: in words.
        bytes: that one pass gives.
        unit: of its values.
        folder: of the data set, that the files are in.
        touch: the offsets that are touched in each file, if it is mapped and not read.
    """

    name: str
    paths: list[str]
    bytes: int
    readers: int = 1
    unit: str = "files/s"
    folder: str = SMALL
    touch: tuple[int, ...] = ()


def new_report(sizes: Sizes) -> CompareReport:
    """A report without values, that knows the goals; none for sizes so small that opening the files is most of it."""
    if sizes != FULL:
        return CompareReport(base=Native.name, goals={})
    goals = {(case_name(sizes.groups[group], which), name): goal for (group, which, name), goal in GOALS.items()}
    return CompareReport(base=Native.name, goals=goals)


def run(work: Path, report: CompareReport, *, rounds: int, sizes: Sizes, variants: Sequence[str]) -> Iterator[str]:
    """Measure into `report`; yields what it does next, for a progress display. Leaves files in `work`, and no mounts.

    Raises:
        NoRoom: the disk or the memory is too small.
        MountFailed, ReadError: the directory itself cannot be read.
    """
    _check_room(work, (sizes.large * sizes.large_size + sizes.small * SMALL_SIZE))
    yield "making the files"
    source = work / "source"
    large = dataset.make_plain(source / LARGE, count=sizes.large, size=sizes.large_size)
    small = dataset.make_plain(source / SMALL, count=sizes.small, size=SMALL_SIZE)
    (source / PROBE).write_bytes(b"\n")
    large_paths = [f"{LARGE}/{sample.path}" for sample in large]
    small_paths = [f"{SMALL}/{sample.path}" for sample in small]
    with _Meter(report) as meter:
        contestants: list[Contestant] = []
        for variant, make in CONTESTANTS.items():
            if variant not in {"native", *variants}:
                continue
            contestant = make(source, work / variant)
            yield f"preparing {contestant.name}"
            if meter.prepare(contestant, [PROBE, *large_paths, *small_paths]):
                contestants.append(contestant)
        for number in range(rounds):
            order = shuffled(small_paths, epoch=number)
            pages = range(0, sizes.large_size - PAGE_SIZE + 1, PAGE_SIZE)
            touch = tuple(random.Random(number).sample(pages, sizes.touches))
            names = sizes.groups
            groups = [
                Group(names["large"], large_paths, total_bytes(large), unit="GB/s", folder=LARGE),
                Group(
                    names["mapped"],
                    large_paths,
                    sizes.large * len(touch) * PAGE_SIZE,
                    unit="k pages/s",
                    folder=LARGE,
                    touch=touch,
                ),
                Group(names["small"], order, total_bytes(small)),
                Group(names["small by 4"], order, total_bytes(small), readers=4),
            ]
            for group in groups:
                turn = number % len(contestants)
                for contestant in (*contestants[turn:], *contestants[:turn]):
                    if contestant.name == PUSHED and group.folder != SMALL:
                        continue
                    yield f"round {number + 1} of {rounds}: {group.name}: {contestant.name}"
                    if not meter.measure(contestant, group):
                        contestants.remove(contestant)


def _check_room(work: Path, size: int) -> None:
    """See that the files fit as often as they are kept. Raises NoRoom."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = next(int(line.split()[1]) * KiB for line in lines if line.startswith("MemAvailable:"))
    disk = shutil.disk_usage(work).free
    for what, found, wanted in (("memory", memory, MEMORY_FOLD * size), (f"disk at {work}", disk, DISK_FOLD * size)):
        if found < wanted:
            raise NoRoom(
                f"{what}: {found / 1e9:.1f} GB are free, {wanted / 1e9:.1f} GB are needed; "
                "try --quick (or --dir, if it is the disk)"
            )


def _files(folder: Path, *, are_large: bool) -> list[str]:
    """The large files below a folder, or the others, relative to it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if (path.stat().st_size >= LARGE_SIZE) == are_large]


class _Meter:
    """Reads with pools of readers, and puts what it took into the report; a context manager, which ends the readers."""

    def __init__(self, report: CompareReport) -> None:
        self._report = report
        self._pools: dict[int, ReaderPool] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "_Meter":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._end_pools()

    def prepare(self, contestant: Contestant, files: list[str]) -> bool:
        """Prepare a contestant; False if it had to be left out."""
        return self._tried(contestant, lambda: self._prepare(contestant, files))

    def measure(self, contestant: Contestant, group: Group) -> bool:
        """Measure one group of files in one round; False if the contestant had to be left out."""
        return self._tried(contestant, lambda: self._measure(contestant, group))

    def _tried(self, contestant: Contestant, action: Callable[[], None]) -> bool:
        """True if the action works. If not, the contestant is left out and nothing of it is in the report."""
        try:
            action()
        except NotInstalled as exc:
            self._report.leave_out(contestant.name, f"not installed; scripts/bench compare --install does it, or {exc}")
        except (MountFailed, ReadError, OSError, subprocess.SubprocessError) as exc:
            self._end_pools()  # a reader may hang in what has been unmounted
            if contestant.name == self._report.base:
                raise
            self._report.leave_out(contestant.name, (str(exc).strip().splitlines() or [repr(exc)])[-1])
        else:
            return True
        return False

    def _prepare(self, contestant: Contestant, files: list[str]) -> None:
        contestant.prepare(
            len(files), lambda root: self._pool(4).read(root, files, drop_pages=True, timeout=FILL_TIMEOUT)
        )
        # Pages that are not on the disk yet could not be dropped.
        run_command(["sync", "--file-system", str(contestant.backing)], timeout=FILL_TIMEOUT)
        self._report.add_variant(contestant.name, contestant.version)

    def _measure(self, contestant: Contestant, group: Group) -> None:
        backing = contestant.backing
        files = _files(backing, are_large=group.folder == LARGE)
        # How fast pages are read depends on how they came into the page cache: those of a file just written, or read by
        # several in pieces, differ by up to half from those of one read from end to end. So all are read in anew.
        self._read(backing, files, drop_pages=True)
        self._read(backing, files)
        with contestant.mounted(group.folder) as served:
            self._pool(1).read(served.root, [PROBE], timeout=PASS_TIMEOUT)
            self._passes(contestant, group, FIRST, served, repeats=contestant.name == self._report.base)
            if contestant.name != PUSHED:
                self._read(backing, files)
                self._passes(contestant, group, AGAIN, served, repeats=True)
            if served.dmfs:
                found = served.dmfs.status()["source"]["bytes"]
                self._report.check("dmfs: bytes read from the source", expected=0, found=found)

    def _passes(self, contestant: Contestant, group: Group, which: str, served: Served, *, repeats: bool) -> None:
        """Read the files once, or as often as it takes."""
        seconds: list[float] = []
        before = session_cpu_seconds(served.pid) if served.pid else 0.0
        while not seconds or (repeats and sum(seconds) < ENOUGH and len(seconds) < MOST_PASSES):
            epoch = self._pool(group.readers).read(served.root, group.paths, touch=group.touch, timeout=PASS_TIMEOUT)
            if epoch.bytes != group.bytes:
                raise MountFailed(f"gave {epoch.bytes:,} bytes of {group.bytes:,}")
            seconds.append(epoch.seconds)
        cpu = (session_cpu_seconds(served.pid) - before) / sum(seconds) if served.pid else None
        amounts = {"GB/s": group.bytes / 1e9, "k pages/s": group.bytes / PAGE_SIZE / 1e3, "files/s": len(group.paths)}
        value = amounts[group.unit] / median(seconds)
        self._report.add(case_name(group.name, which), contestant.name, value, unit=group.unit, cpu=cpu)

    def _read(self, folder: Path, files: list[str], *, drop_pages: bool = False) -> None:
        """Have files of a local disk in the page cache, or not there."""
        self._pool(4).read(folder, files, drop_pages=drop_pages, timeout=FILL_TIMEOUT)

    def _pool(self, readers: int) -> ReaderPool:
        """The pool of so many readers, started if there is none."""
        if readers not in self._pools:
            self._pools[readers] = self._stack.enter_context(ReaderPool(readers))
        return self._pools[readers]

    def _end_pools(self) -> None:
        self._pools.clear()
        self._stack.close()
