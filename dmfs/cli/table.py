"""The status of mounts as tables for people: 80 columns wide and without colours where the output is no terminal."""

import shutil
import sys
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dmfs.cli.output import amount, duration, printable

WIDTH = 80  # columns at least, and where nobody says how wide the paper is
MAX_LINES = 8  # waiting calls and errors shown; --json has them all
_GOOD = {"mounted", "ok"}


def show(mounts: list[dict[str, Any]]) -> None:
    """Print the statuses of mounts, as `dmfs status --json` gives them."""
    # In a narrower terminal lines wrap, which is better than numbers cut off.
    width = max(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, soft_wrap=False)
    with console.capture() as capture:
        for index, mount in enumerate(mounts):
            if index:
                console.print()
            console.print(_mount(mount))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _mount(mount: dict[str, Any]) -> RenderableType:
    title = Text.assemble((printable(mount["mountpoint"]), "bold"), "  ", _state(mount["state"]), overflow="fold")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    source = mount.get("source", {})
    rows.add_row("source", printable(str(source.get("path", ""))))
    if "version" not in mount:
        rows.add_row("daemon", f"pid {mount.get('pid')} does not answer; dmfs umount --force ends it")
        return Group(title, Padding(rows, (0, 0, 0, 2)))
    rows.add_row("front end", f"{mount['front_end']}, {mount['io_mode']} ({mount['io_mode_reason']})")
    daemon = f"dmfs {mount['version']}, pid {mount['pid']}, user {printable(mount['user'])}"
    rows.add_row("daemon", f"{daemon}, up {duration(mount['uptime_s'])}")
    rows.add_row("tiers", _tiers(mount["tiers"]))
    rows.add_row("served", _served(mount["served"]))
    rows.add_row("at source", _source(source))
    fills = mount["fills"]
    rows.add_row(
        "fills",
        f"{fills['active']:,} active, {fills['queued']:,} queued, {fills['done']:,} done, {fills['failed']:,} failed, "
        f"{amount(fills['bytes'])} copied",
    )
    rows.add_row("waiting", _waiting(mount["waiting"]))
    rows.add_row("errors", _errors(mount["errors"]))
    return Group(title, Padding(rows, (0, 0, 0, 2)))


def _state(state: str) -> Text:
    return Text(printable(state), style="green" if state in _GOOD else "bold red")


def _columns(*names: str) -> Table:
    """A table without lines, of numbers and short words."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = _columns("used", "capacity", "copies")
    table.add_column("state", max_width=16)  # a disk's complaint may be long, and the path needs room
    table.add_column("path", overflow="fold")
    for tier in tiers:
        table.add_row(
            amount(tier["used_bytes"]),
            amount(tier["capacity_bytes"]),
            f"{tier['copies']:,}",
            _state(tier["state"]),
            printable(tier["path"]),
        )
    return table


def _served(served: dict[str, dict[str, int]]) -> Table:
    table = _columns("from", "opens", "reads", "bytes")
    table.columns[0].justify = "left"
    for place in ("local", "peer", "source"):
        counts = served[place]
        table.add_row(place, f"{counts['opens']:,}", f"{counts['reads']:,}", amount(counts["bytes"]))
    kernel = served["kernel"]
    if kernel["opens"]:
        table.add_row("kernel", f"{kernel['opens']:,}", "", f"at most {amount(kernel['file_bytes'])}")
    return table


def _source(source: dict[str, Any]) -> Table:
    table = _columns("opens", "reads", "bytes", "stats", "listings")
    table.add_row(
        f"{source['opens']:,}",
        f"{source['reads']:,}",
        amount(source["bytes"]),
        f"{source['stats']:,}",
        f"{source['listings']:,}",
    )
    return table


def _waiting(calls: list[dict[str, Any]]) -> str:
    lines = [f"{duration(call['age_s'])}  {printable(call['path'] or '.')}" for call in calls]
    return _some(lines) or "nothing"


def _errors(errors: list[dict[str, Any]]) -> str:
    now = time.time()
    lines = [
        f"{printable(error['message'])} ({error['count']:,} times, last {duration(now - error['last'])} ago)"
        for error in reversed(errors)
    ]
    return _some(lines) or "none"


def _some(lines: list[str]) -> str:
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {len(lines) - MAX_LINES} more, see --json"]
    return "\n".join(lines)
