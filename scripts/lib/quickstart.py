"""The quick start: dmfs over a slow file system, three epochs of a small image data set, and what each of them cost the source.

Everything lies in one temporary folder, which is removed at the end, whatever happens. What the source was asked for is counted by
the slow file system itself, and each byte read is compared (by digest) with the original.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.lib import dataset
from scripts.lib.dataset import Sample, total_bytes
from scripts.lib.mounts import DmfsMount, MountFailed, interrupt_once
from scripts.lib.readers import Epoch, ReaderPool, ReadError, shuffled
from scripts.lib.slowfs_client import SlowFs, SlowFsError

IMAGES = 1000
SHARDS = 4
IMAGES_IN_SHARDS = 200
READERS = 4

LATENCY = 0.003  # seconds per operation: a busy Lustre
BANDWIDTH = 50_000_000  # bytes per second
AGE = 864_000.0  # seconds: the files look ten days old, as a data set's files are

WIDTH = 80  # columns, at most


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: an epoch, and what it asked of the source meanwhile."""

    name: str
    epoch: Epoch
    source_bytes: int
    source_opens: int


class Damaged(Exception):
    """Bytes that were read differ from the original. The message names a file."""


class QuickStart:
    """The steps, and the way they are shown."""

    def __init__(self, console: Console, work: Path) -> None:
        self.console = console
        self.work = work
        self.samples: list[Sample] = []
        self.rows: list[Row] = []

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """A progress bar while the block runs; gives a function that advances it. Leaves a line with a tick behind."""
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(f"{name:<34}", total=total)
            yield lambda count=1, *_: progress.advance(task, count)

    def make_dataset(self) -> None:
        """JPEG files in class folders, and shards of records."""
        folder = self.work / "data"
        with self.step("making a data set of JPEG files", IMAGES + SHARDS) as advance:
            images = dataset.make_images(folder / "train", count=IMAGES, on_file=advance)
            some = images[:IMAGES_IN_SHARDS]
            shards = dataset.make_shards(folder / "shards", folder / "train", some, count=SHARDS, on_file=advance)
        self.samples = [Sample(f"train/{sample.path}", sample.size, sample.digest) for sample in images]
        self.samples += [Sample(f"shards/{sample.path}", sample.size, sample.digest) for sample in shards]

    def read_epoch(self, name: str, root: Path, pool: ReaderPool, slow: SlowFs) -> None:
        """Read all files in the next random order, check them, and note what it took. Raises Damaged, ReadError."""
        before = slow.counters()
        paths = shuffled([sample.path for sample in self.samples], epoch=len(self.rows))
        with self.step(f"{name}, {READERS} readers", len(paths)) as advance:
            # Pages are dropped after each file, or the kernel's page cache would hide from epoch 2 on what dmfs does.
            epoch = pool.read(root, paths, digest=True, drop_pages=True, on_progress=advance)
        after = slow.counters()
        for sample in self.samples:
            if epoch.digests[sample.path] != sample.digest:
                raise Damaged(f"{sample.path} was not read as it was written")
        self.rows.append(Row(name, epoch, after.bytes - before.bytes, after.opens - before.opens))

    def result_table(self) -> Table:
        """The rows."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("files/s", "MB/s", "source opens", "source bytes", "served from"):
            table.add_column(name, justify="right")
        for row in self.rows:
            is_local = row.source_bytes == 0
            table.add_row(
                row.name,
                f"{row.epoch.files_per_second:,.0f}",
                f"{row.epoch.bytes_per_second / 1e6:,.0f}",
                f"{row.source_opens:,}",
                f"{row.source_bytes:,}",
                "local disk" if is_local else "source",
                style="green" if is_local else "",
            )
        return table

    def verdict(self) -> tuple[bool, str]:
        """Whether all went as it must, and two sentences that say what was seen."""
        direct, *epochs = self.rows
        size = total_bytes(self.samples)
        is_right = epochs[0].source_bytes == size and all(
            row.source_bytes == row.source_opens == 0 for row in epochs[1:]
        )
        if not is_right:
            counts = ", ".join(f"{row.source_bytes:,}" for row in epochs)
            return (
                False,
                f"The epochs read {counts} bytes from the source; it should be {size:,}, 0 and 0. This is a bug.",
            )
        gain = min(row.epoch.files_per_second for row in epochs[1:]) / direct.epoch.files_per_second
        return True, (
            f"Epoch 1 read each of the {size:,} bytes once from the source; epoch 2 and, after a restart of dmfs, epoch 3 read "
            f"0 bytes from it and were {gain:.0f} times as fast as the source alone. "
            "Every byte that was read was compared with the original."
        )


def run(console: Console, work: Path, *, keep: bool) -> bool:
    """All steps. Returns True if dmfs did what it must. Leaves the mounts up if `keep`."""
    quick = QuickStart(console, work)
    console.print(
        Panel(
            f"A slow file system ({LATENCY * 1000:.0f} ms an operation, {BANDWIDTH / 1e6:.0f} MB/s) stands for Lustre, "
            f"and four processes read a data set from it as a training job does: first directly, then through dmfs.\n"
            f"[dim]Everything is in {work}[/]",
            title="[bold]dmfs quick start[/]",
            title_align="left",
            box=ROUNDED,
        )
    )
    quick.make_dataset()
    with ExitStack() as stack:
        slow = stack.enter_context(SlowFs(work / "data", work / "slow", latency=LATENCY, bandwidth=BANDWIDTH, age=AGE))
        pool = stack.enter_context(ReaderPool(READERS))
        quick.read_epoch("without dmfs", slow.mountpoint, pool, slow)
        mount = stack.enter_context(DmfsMount(slow.mountpoint, work / "view", work / "cache"))
        console.print(f"[green]✓[/] dmfs mount: ready after {mount.mount_seconds:.1f} s")
        quick.read_epoch("epoch 1", mount.mountpoint, pool, slow)
        mount.wait_idle()
        quick.read_epoch("epoch 2", mount.mountpoint, pool, slow)
        mount.unmount()
        mount.mount()
        console.print(f"[green]✓[/] dmfs umount, dmfs mount: ready again after {mount.mount_seconds:.1f} s")
        quick.read_epoch("epoch 3", mount.mountpoint, pool, slow)
        console.print(quick.result_table())
        show_status(console, mount)
        is_right, sentences = quick.verdict()
        console.print(sentences, style="" if is_right else "bold red", highlight=False)
    return is_right


def show_status(console: Console, mount: DmfsMount) -> None:
    """A few lines of `dmfs status`."""
    status = mount.status()
    console.print(status)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="Leave everything mounted at the end, to try things.")
def main(keep: bool) -> None:
    """Show dmfs at work: three epochs of a small image data set on a slow file system, with a restart in between.

    \b
    Example: scripts/quickstart --keep
    """
    console = Console(width=min(WIDTH, Console().width))
    interrupt_once()
    work = Path(tempfile.mkdtemp(prefix="dmfs-quickstart-")).resolve()
    try:
        is_right = run(console, work, keep=keep)
    except (MountFailed, SlowFsError, ReadError, Damaged) as exc:
        console.print(f"[bold red]failed:[/] {exc}", highlight=False)
        is_right = False
    except KeyboardInterrupt:
        console.print("[bold]interrupted[/]")
        is_right = False
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
