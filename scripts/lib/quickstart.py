"""The quick start: dmfs over a slow file system, three epochs of a small image data set, and what each cost the source.

Everything lies in one temporary folder, which is removed at the end, whatever happens. What the source was asked for is
counted by the slow file system itself, and each file that is read is compared, by digest, with the original.
"""

import os
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
from scripts.lib.mounts import DmfsMount, MountFailed, interrupt_once, is_mounted
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
    """One line of the result: an epoch, and what was asked of the source meanwhile."""

    name: str
    epoch: Epoch
    lookups: int
    opens: int
    bytes: int


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
        with self.step(f"{IMAGES:,} JPEG files, {SHARDS} record shards", IMAGES + SHARDS) as advance:
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
        counts = (after.stats - before.stats, after.opens - before.opens, after.bytes - before.bytes)
        self.rows.append(Row(name, epoch, *counts))

    def result_table(self) -> Table:
        """The rows."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", width=self.console.width)
        table.add_column("")
        for name in ("files/s", "MB/s", "look-ups", "opens", "bytes", "served from"):
            table.add_column(name, justify="right")
        for row in self.rows:
            is_local = row.bytes == 0
            table.add_row(
                row.name,
                f"{row.epoch.files_per_second:,.0f}",
                f"{row.epoch.bytes_per_second / 1e6:,.0f}",
                f"{row.lookups:,}",
                f"{row.opens:,}",
                f"{row.bytes:,}",
                "local disk" if is_local else "source",
                style="green" if is_local else "",
            )
        return table

    def verdict(self) -> tuple[bool, str]:
        """Whether all went as it must, and two sentences that say what was seen."""
        direct, first, *later = self.rows
        size = total_bytes(self.samples)
        if first.bytes != size or any(row.bytes or row.opens for row in later):
            counts = ", ".join(f"{row.bytes:,}" for row in (first, *later))
            return (
                False,
                f"The epochs read {counts} bytes from the source; it should be {size:,}, 0 and 0. This is a bug.",
            )
        gains = [row.epoch.files_per_second / direct.epoch.files_per_second for row in later]
        return True, (
            f"Epoch 1 read each of the {size:,} bytes from the source once. Epoch 2 and, after the restart, "
            f"epoch 3 read 0 bytes from it, at {gains[0]:.1f} and {gains[1]:.1f} times the speed of the source "
            "(a restart looks up each name once more). All that was read was compared with the original."
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
        with ReaderPool(READERS) as pool:
            quick.read_epoch("without dmfs", slow.mountpoint, pool, slow)
            mount = stack.enter_context(DmfsMount(slow.mountpoint, work / "view", work / "cache", size="1GiB"))
            console.print(f"[green]✓[/] dmfs mount: ready after {mount.mount_seconds:.1f} s")
            quick.read_epoch("epoch 1", mount.mountpoint, pool, slow)
            mount.wait_idle()
            quick.read_epoch("epoch 2", mount.mountpoint, pool, slow)
            mount.unmount()
            mount.mount()
            console.print(f"[green]✓[/] dmfs umount, dmfs mount: ready again after {mount.mount_seconds:.1f} s")
            quick.read_epoch("epoch 3", mount.mountpoint, pool, slow)
        is_right, sentences = quick.verdict()
        console.print("\n[bold]What each epoch asked of the source[/]", quick.result_table())
        console.print("[bold]From dmfs status[/], since the restart\n", excerpt(mount.status_text()), highlight=False)
        console.print(sentences, style="" if is_right else "bold red", highlight=False)
        if keep:
            stack.pop_all()
            say_how_to_go_on(console, work)
        else:
            console.print("\n[dim]Unmounting and removing the files ...[/]")
    return is_right


def excerpt(status: str) -> str:
    """The tiers, and what was served and asked, of what `dmfs status` prints."""
    lines = status.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("  tiers")]
    ends = [number for number, line in enumerate(lines) if line.startswith("  fills")]
    return "\n".join(lines[starts[0] : ends[0]] if starts and ends else lines) + "\n"


def say_how_to_go_on(console: Console, work: Path) -> None:
    """What to type while it is mounted, and to end it."""
    command = Path(sys.executable).with_name("dmfs")
    umount = "umount" if os.geteuid() == 0 else "fusermount3 -u"
    console.print(
        f"\n[bold]Everything is still mounted.[/] Try:\n\n"
        f"  cd {work}\n"
        f"  ls view/train/cloud\n"
        f"  {command} status view\n\n"
        f"and at the end:\n\n"
        f"  cd && {command} umount {work}/view && {umount} {work}/slow && rm -r {work}",
        highlight=False,
        soft_wrap=True,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="Leave everything mounted at the end, to try things.")
def main(keep: bool) -> None:
    """Show dmfs at work: three epochs of a small image data set on a slow file system, with a restart in between.

    \b
    Example: scripts/quickstart --keep
    """
    console = Console(width=min(WIDTH, Console().width))
    interrupt_once()
    work = Path(tempfile.mkdtemp(prefix="dmfs-demo-")).resolve()
    code = 1
    try:
        code = 0 if run(console, work, keep=keep) else 1
    except (MountFailed, SlowFsError, ReadError, Damaged) as exc:
        console.print(f"[bold red]failed:[/] {exc}", highlight=False)
    except KeyboardInterrupt:
        console.print("[bold]interrupted[/]")
        code = 130
    finally:
        if not is_mounted(work / "view") and not is_mounted(work / "slow"):
            shutil.rmtree(work, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="scripts/quickstart")
