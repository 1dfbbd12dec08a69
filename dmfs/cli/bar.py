"""The progress bar of `dmfs warm`, on standard error. The only module besides table.py that loads rich."""

import contextlib
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dmfs.cli.bounded import Stream
from dmfs.cli.output import amount
from dmfs.cli.walk import Count
from dmfs.errors import UserError


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{amount(int(task.speed))}/s")


class Bar:
    """A line that is gone afterwards. A context manager; nothing moves but by `show`, as no thread is started."""

    def __init__(self, counts: Stream[Count]) -> None:
        """`counts` says how much there will be; it stays the caller's."""
        self._counts = counts
        self._total = Count(0, 0, False)
        self._progress = Progress(
            BarColumn(bar_width=10),
            TextColumn("{task.fields[words]}"),
            _Speed(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, words="looking for files")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, files: int, size: int) -> None:
        """So many files are dealt with, and their bytes."""
        # What goes wrong there goes wrong for who walks to copy, too.
        with contextlib.suppress(OSError, EOFError, UserError):
            while True:
                self._total = self._counts.take(0)
        total, more = self._total, "" if self._total.is_complete else "+"
        # The one who copies may be ahead of the one who counts.
        files_known, bytes_known = max(files, total.files), max(size, total.bytes)
        self._progress.update(
            self._task,
            completed=size,
            total=total.bytes if total.is_complete else None,
            words=f"{files:,}/{files_known:,}{more} files, {amount(size)}/{amount(bytes_known)}{more}",
        )
        self._progress.refresh()
