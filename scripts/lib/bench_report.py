"""What a benchmark found, and the three ways to show it: a table, JSON, a plot. Measures nothing.

A benchmark compares variants within one run: each round measures every variant, and a ratio is always taken between two
values of the same round, so that what else the machine does falls on both.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import dmfs

MAX_LINEAR = 6.0  # a plot with a greater ratio than this has a logarithmic axis


@dataclass(slots=True)
class Series:
    """The values of one variant in one case, a value a round.

    Attributes:
        cpu: processor time of the file system's process per second measured (1.0 is one core), a value a round.
    """

    case: str
    variant: str
    unit: str
    values: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Check:
    """A number that must be exactly so."""

    name: str
    expected: int
    found: int

    @property
    def is_met(self) -> bool:
        """True if it is so."""
        return self.expected == self.found


class Report:
    """The series and checks of one benchmark.

    Attributes:
        base: the variant that the others are divided by.
        ratio_name: what the ratio means, in words that go on with the base: `times as fast as`.
    """

    def __init__(self, title: str, *, base: str, ratio_name: str) -> None:
        self.title = title
        self.base = base
        self.ratio_name = ratio_name
        self.series: list[Series] = []
        self.checks: list[Check] = []

    def add(self, case: str, variant: str, value: float, *, unit: str, cpu: float | None = None) -> None:
        """Add the value of a round."""
        series = self.find(case, variant)
        if series is None:
            series = Series(case, variant, unit)
            self.series.append(series)
        series.values.append(value)
        if cpu is not None:
            series.cpu.append(cpu)

    def check(self, name: str, *, expected: int, found: int) -> None:
        """Note a number that must be exactly `expected`."""
        self.checks.append(Check(name, expected, found))

    def find(self, case: str, variant: str) -> Series | None:
        """The series of a variant in a case, if there is one."""
        return next((s for s in self.series if s.case == case and s.variant == variant), None)

    def ratios(self, series: Series) -> list[float]:
        """Value over the base's value in the same round; empty where the case has no base."""
        base = self.find(series.case, self.base)
        return [value / other for value, other in zip(series.values, base.values, strict=True)] if base else []

    @property
    def cases(self) -> list[str]:
        """The cases, in the order in which they were first met."""
        return list(dict.fromkeys(series.case for series in self.series))

    @property
    def is_met(self) -> bool:
        """True if all checks are met."""
        return all(check.is_met for check in self.checks)

    # ---- showing

    def print(self, console: Console) -> None:
        """A small table for each case, and the checks below. Fits 80 columns."""
        console.print(f"[bold]{self.title}: {self.ratio_name} {self.base}[/]\n", highlight=False)
        for case in self.cases:
            table = Table(box=None, title=f"[bold]{case}[/]", title_justify="left", title_style="", padding=(0, 1))
            table.add_column("", width=20)
            for name, width in (("median", 18), ("ratio: min", 10), ("median", 8), ("max", 8), ("CPU", 5)):
                table.add_column(name, justify="right", width=width, header_style="dim")
            for series in (series for series in self.series if series.case == case):
                ratios = self.ratios(series)
                spread = [number(value) for value in (min(ratios), median(ratios), max(ratios))] if ratios else [""] * 3
                value = f"{number(median(series.values))} {series.unit}"
                table.add_row(series.variant, value, *spread, f"{median(series.cpu):.0%}" if series.cpu else "")
            console.print(table, "")
        self.print_checks(console)

    def print_checks(self, console: Console) -> None:
        """A line for each kind of check: met, or by how much one was missed."""
        for name in dict.fromkeys(check.name for check in self.checks):
            missed = [check for check in self.checks if check.name == name and not check.is_met]
            found = next(check for check in self.checks if check.name == name) if not missed else missed[0]
            if missed:
                line = f"[bold red]✗[/] {name}: {found.found:,}, should be {found.expected:,}"
            else:
                line = f"[green]✓[/] {name}: {found.found:,}"
            console.print(line, highlight=False)

    def as_json(self) -> str:
        """Everything, values of all rounds included."""
        return json.dumps(self.document(), indent=2)

    def document(self) -> dict[str, Any]:
        """What JSON is made of."""
        return {
            "title": self.title,
            "base": self.base,
            "ratio": self.ratio_name,
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "dmfs": dmfs.__version__,
            },
            "series": [asdict(series) | {"ratios": self.ratios(series)} for series in self.series],
            "checks": [asdict(check) | {"is_met": check.is_met} for check in self.checks],
        }

    def plot(self, file: Path) -> None:
        """A bar per case and variant: the median ratio, a line from least to greatest. The suffix says the format."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.ticker import ScalarFormatter

        cases = self.cases
        variants = list(dict.fromkeys(series.variant for series in self.series if series.variant != self.base))
        thickness = 0.8 / len(variants)
        figure, axes = plt.subplots(figsize=(8, 1.6 + 0.32 * len(cases) * len(variants)), layout="constrained")
        least = greatest = 1.0
        for index, variant in enumerate(variants):
            found = [(row, s) for row, case in enumerate(cases) if (s := self.find(case, variant)) and self.ratios(s)]
            rows = [row + (index - (len(variants) - 1) / 2) * thickness for row, _ in found]
            ratios = [self.ratios(series) for _, series in found]
            middles = [median(r) for r in ratios]
            spans = [
                [m - min(r) for m, r in zip(middles, ratios, strict=True)],
                [max(r) - m for m, r in zip(middles, ratios, strict=True)],
            ]
            axes.barh(rows, middles, thickness * 0.9, xerr=spans, label=variant, error_kw={"lw": 1, "capsize": 2})
            least = min([least, *(min(r) for r in ratios)])
            greatest = max([greatest, *(max(r) for r in ratios)])
            for row, middle, ratio in zip(rows, middles, ratios, strict=True):
                axes.annotate(f" {middle:.2f}", (max(ratio), row), va="center", fontsize=8)
        axes.axvline(1, color="black", lw=1, ls="--")
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        if greatest > MAX_LINEAR:
            axes.set_xscale("log")
            axes.set_xlim(least / 2, greatest * 2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
        else:
            axes.set_xlim(0, greatest * 1.15)
        axes.set_xlabel("median of the rounds; lines: least and greatest")
        axes.set_title(f"{self.title}: {self.ratio_name} {self.base}", loc="left")
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=150)


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 1 else f"{value:.2f}"
