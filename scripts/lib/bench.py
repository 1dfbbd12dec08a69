"""The command line of the benchmarks: options, progress, output. What is measured is in the bench_* modules."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from scripts.lib import bench_compare, bench_epochs, bench_startup, bench_warm
from scripts.lib.bench_compare import NoRoom
from scripts.lib.bench_report import Report
from scripts.lib.mounts import MountFailed, interrupt_once
from scripts.lib.readers import ReadError
from scripts.lib.slowfs_client import SlowFsError


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every benchmark has."""
    for option in reversed(
        [
            click.option(
                "--rounds", default=5, show_default=True, type=click.IntRange(1), help="How often to measure."
            ),
            click.option("--quick", is_flag=True, help="A tenth of the sizes, to see whether it works."),
            click.option("--json", "as_json", is_flag=True, help="Print JSON with the values of all rounds."),
            click.option(
                "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a plot (.png, .svg, .pdf)."
            ),
            click.option(
                "--dir",
                "folder",
                type=click.Path(path_type=Path, file_okay=False, exists=True),
                help="Where to put the files, on a local disk (default: the folder for temporary files).",
            ),
        ]
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure dmfs against something known, as ratios within one run.

    \b
    Example: scripts/bench warm --quick
             scripts/bench compare --plot compare.png
    """


def measure(
    report: Report,
    steps: Callable[[Path], Iterator[str]],
    *,
    folder: Path | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run the steps of a benchmark in a folder of its own and show what came out. Exits: 1 if a check is missed."""
    console, progress = Console(), Console(stderr=True)
    interrupt_once()
    try:
        with tempfile.TemporaryDirectory(prefix="dmfs-bench-", dir=folder) as work, progress.status("") as status:
            for step in steps(Path(work).resolve()):
                status.update(step)
    except (MountFailed, SlowFsError, ReadError, NoRoom) as exc:
        progress.print(f"[bold red]failed[/]: {exc}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    if plot:
        report.plot(plot)
    if as_json:
        print(report.as_json())
    else:
        report.print(console)
    sys.exit(0 if report.is_met else 1)


@main.command()
@common_options
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=click.Choice(bench_warm.VARIANTS),
    help="Only these (repeatable); the ratios need loopback.",
)
def warm(rounds: int, quick: bool, variants: tuple[bench_warm.Variant, ...], **output: Any) -> None:
    """Warm local reads, against a bare pyfuse3 loop-back file system.

    \b
    Example: scripts/bench warm --variant loopback --variant kernel
    """
    report = Report("Warm reads", base=bench_warm.NAMES["loopback"], ratio_name="times as fast as")
    sizes = bench_warm.QUICK if quick else bench_warm.FULL
    chosen = variants or bench_warm.VARIANTS
    measure(report, lambda work: bench_warm.run(work, report, rounds=rounds, sizes=sizes, variants=chosen), **output)


@main.command()
@common_options
@click.option(
    "--case",
    "names",
    multiple=True,
    type=click.Choice(list(bench_epochs.CASES)),
    help="Only these (repeatable): many small files, few large ones, or these by one reader.",
)
def epochs(rounds: int, quick: bool, names: tuple[str, ...], **output: Any) -> None:
    """Epochs over a slow source, against reading that source directly.

    \b
    Example: scripts/bench epochs --rounds 3
    """
    report = Report("Epochs over a slow source", base=bench_epochs.BASE, ratio_name="times the seconds of")
    cases = bench_epochs.QUICK if quick else bench_epochs.CASES
    chosen = [cases[name] for name in names or cases]
    measure(report, lambda work: bench_epochs.run(work, report, rounds=rounds, chosen=chosen), **output)


@main.command()
@common_options
def startup(rounds: int, quick: bool, **output: Any) -> None:
    """Mounting where the cache holds 200,000 copies.

    \b
    Example: scripts/bench startup --dir /local/scratch
    """
    report = Report("Start-up", base=bench_startup.BASE, ratio_name="times the seconds of")
    copies = bench_startup.COPIES_QUICK if quick else bench_startup.COPIES
    measure(report, lambda work: bench_startup.run(work, report, rounds=rounds, copies=copies), **output)


@main.command()
@common_options
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=click.Choice(list(bench_compare.CONTESTANTS)),
    help="Only these (repeatable); native is always measured.",
)
@click.option("--install", is_flag=True, expose_value=False, help="First install bindfs, rclone and JuiceFS.")
def compare(rounds: int, quick: bool, variants: tuple[str, ...], **output: Any) -> None:
    """dmfs in each I/O mode, and what you would use in its place, against the directory itself.

    \b
    Example: scripts/bench compare --install --plot compare.png
    """
    sizes = bench_compare.QUICK if quick else bench_compare.FULL
    report = bench_compare.new_report(sizes)
    chosen = variants or list(bench_compare.CONTESTANTS)
    measure(report, lambda work: bench_compare.run(work, report, rounds=rounds, sizes=sizes, variants=chosen), **output)


if __name__ == "__main__":
    main(prog_name="scripts/bench")
