"""What the comparison found, as one table and one plot. Measures nothing.

Cases come in pairs, the first reading of a group of files and the one again; a pair is a panel of the plot.
"""

import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.bench_report import Report, Series, number

FIRST = "first"
AGAIN = "again"

OURS = "dmfs"  # the names of our own variants begin with it

WIDTH = 80  # columns, at most

_COLUMNS = (("value", 15), ("min", 5), ("ratio", 5), ("max", 5), ("CPU", 4), ("goal", 6))
_NAME_WIDTH = 24

_COLOURS = {True: "#0b6e99", False: "#7a7a7a"}  # ours, others'
_GOAL_COLOUR = "#d1495b"
_LABEL_WIDTH = 1.5  # a figure on the log axis: from its left end to its right, as a ratio


def case_name(group: str, which: str) -> str:
    """The case of a group of files and one of FIRST and AGAIN."""
    return f"{group}, {which}"


class CompareReport(Report):
    """A report with goals, and with the contestants that were left out.

    Attributes:
        goals: the ratio that a median is meant to reach, by case and variant. Missing one is no failed check.
        variants: all that may have series, in the order in which they are drawn.
        versions: of what was measured.
        left_out: why, by variant.
    """

    def __init__(self, *, base: str, goals: dict[tuple[str, str], float]) -> None:
        super().__init__("Files on the local disk", base=base, ratio_name="times as fast as")
        self.goals = goals
        self.variants: list[str] = []
        self.versions: list[str] = []
        self.left_out: dict[str, str] = {}

    def add_variant(self, variant: str, version: str | None) -> None:
        """Note what will be measured; one version may be that of several."""
        self.variants.append(variant)
        if version and version not in self.versions:
            self.versions.append(version)

    def leave_out(self, variant: str, reason: str) -> None:
        """Forget what was measured of a variant, and note why it is missing."""
        self.series = [series for series in self.series if series.variant != variant]
        self.left_out[variant] = reason

    def goal(self, series: Series) -> float | None:
        """The ratio that it is meant to reach, if there is one."""
        return self.goals.get((series.case, series.variant))

    def is_reached(self, series: Series) -> bool | None:
        """Whether the median ratio reaches the goal; None if there is none."""
        goal = self.goal(series)
        return None if goal is None else median(self.ratios(series)) >= goal

    def document(self) -> dict[str, Any]:
        """With each series' goal, and with what was left out."""
        document = super().document()
        for series, entry in zip(self.series, document["series"], strict=True):
            entry |= {"goal": self.goal(series), "is_reached": self.is_reached(series)}
        return document | {"versions": self.versions, "left_out": self.left_out}

    # ---- the table

    def print(self, console: Console) -> None:
        """A block of lines for each case, all in the same columns. Fits 80 columns."""
        console.print(f"[bold]{self.title}: {self.ratio_name} {self.base}[/]\n", highlight=False)
        header = _table()
        header.add_row("", *(f"[dim]{name}[/]" for name, _ in _COLUMNS))
        console.print(header)
        for case in self.cases:
            table = _table()
            for series in (series for series in self.series if series.case == case):
                table.add_row(*self._cells(series), style="dim" if series.variant == self.base else "")
            console.print(f"[bold]{case}[/]", table, "", sep="\n", highlight=False)
        rounds = len(self.series[0].values) if self.series else 0
        notes = [
            f"Rounds: {rounds}. The value is their median; the ratio is taken within each round, and its least, its "
            "median and its greatest are shown. CPU is what the file system's own processes used, 100 % for one core."
        ]
        if self.versions:
            notes.append(f"Measured: {', '.join(self.versions)}.")
        notes += [f"Left out: {variant}: {reason}" for variant, reason in self.left_out.items()]
        for note in notes:
            console.print("\n".join(textwrap.wrap(note, WIDTH, subsequent_indent="  ")), highlight=False, markup=False)
        self.print_checks(console)

    def _cells(self, series: Series) -> list[str]:
        """A line of the table."""
        value = f"{number(median(series.values))} {series.unit}"
        if series.variant == self.base:
            return [series.variant, value, "", "1", "", "", ""]
        ratios = self.ratios(series)
        goal, is_reached = self.goal(series), self.is_reached(series)
        return [
            series.variant,
            value,
            _ratio(min(ratios)),
            f"[bold]{_ratio(median(ratios))}[/]",
            _ratio(max(ratios)),
            f"{median(series.cpu):.0%}" if series.cpu else "",
            "" if goal is None else f"{goal:g} " + ("[green]✓[/]" if is_reached else "[red]✗[/]"),
        ]

    # ---- the plot

    def plot(self, file: Path) -> None:
        """A panel for each group of files and a line for each variant: how far it is from the base, on a log scale."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, NullFormatter

        groups = list(dict.fromkeys(case.rpartition(", ")[0] for case in self.cases))
        drawn = {series.variant for series in self.series} - {self.base}
        variants = [variant for variant in self.variants if variant in drawn]
        ratios = [ratio for series in self.series for ratio in self.ratios(series)]
        limits = (min(ratios, default=0.1) / 2, max(ratios, default=1.0) * 1.7)  # with room for the figures
        figure, panels = plt.subplots(
            (len(groups) + 1) // 2,
            2,
            figsize=(11, 1.6 + 0.36 * len(variants) * ((len(groups) + 1) // 2)),
            sharex=True,
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        for axes, group in zip(panels.flat, groups, strict=False):
            for row, variant in enumerate(variants):
                self._draw(axes, row, group, variant)
            axes.axvline(1, color="black", lw=1, zorder=1)
            axes.set_title(group, loc="left", fontsize=10)
            axes.set_xscale("log")
            axes.set_xlim(*limits)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_yticks(range(len(variants)), variants)
            axes.set_ylim(len(variants) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", which="major", color="#e4e4e4", zorder=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
        for axes in panels.flat[len(groups) :]:
            axes.set_visible(False)
        for label in (label for axes in panels[:, 0] for label in axes.get_yticklabels()):
            label.set_color(_COLOURS[label.get_text().startswith(OURS)])
        figure.suptitle(f"{self.title}: {self.ratio_name} {self.base} (line at 1)", x=0.01, ha="left", weight="bold")
        marks = [
            Line2D([], [], color="black", marker="o", mfc="white", ls="", label="read for the first time"),
            Line2D([], [], color="black", marker="o", ls="", label="read again"),
            Line2D([], [], color="black", alpha=0.3, lw=6, label="least to greatest"),
            Line2D([], [], color=_GOAL_COLOUR, marker="|", ms=11, mew=2, ls="", label="goal"),
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        figure.savefig(file, dpi=150)
        plt.close(figure)

    def _draw(self, axes: Any, row: int, group: str, variant: str) -> None:
        """One line of a panel: a hollow mark for the first reading, a full one for the second, and their goals."""
        colour = _COLOURS[variant.startswith(OURS)]
        found = [(which, self.find(case_name(group, which), variant)) for which in (FIRST, AGAIN)]
        ratios = {which: self.ratios(series) for which, series in found if series}
        middles = {which: median(values) for which, values in ratios.items()}
        goals = [goal for _, series in found if series and (goal := self.goal(series))]
        for which, values in ratios.items():
            fill = "white" if which == FIRST else colour
            axes.plot([min(values), max(values)], [row, row], color=colour, lw=6, alpha=0.3, solid_capstyle="butt")
            axes.plot([middles[which]], [row], marker="o", ms=7, mfc=fill, mec=colour, mew=1.5, zorder=4)
        axes.plot(middles.values(), [row] * len(middles), color=colour, lw=1.5, zorder=2)
        axes.plot(goals, [row] * len(goals), marker="|", ms=16, mew=2, ls="", color=_GOAL_COLOUR, zorder=3)
        # The figures stand outside of the marks, the least on the left, where they cannot cover each other.
        least = min(middles, key=lambda which: middles[which]) if len(middles) > 1 else None
        for which, middle in middles.items():
            is_left = which == least
            edge = min(ratios[which]) if is_left else max(ratios[which])
            for goal in goals:
                if edge < goal < edge * _LABEL_WIDTH and not is_left:
                    edge = goal
            axes.annotate(
                _ratio(middle),
                (edge, row),
                (-7 if is_left else 7, 0),
                textcoords="offset points",
                ha="right" if is_left else "left",
                va="center",
                fontsize=8,
                color=colour,
                zorder=5,
            )


def _table() -> Table:
    """Columns without a frame or a header."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column(width=_NAME_WIDTH)
    for _, width in _COLUMNS:
        table.add_column(justify="right", width=width, no_wrap=True)
    return table


def _ratio(value: float) -> str:
    """Two digits after the point, three where it is small."""
    return f"{value:.3f}" if value < 0.095 else f"{value:.2f}"
