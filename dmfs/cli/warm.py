"""`dmfs warm`: files of a mount are copied to its tiers, and pushed into memory, before anybody asks for them.

The command finds the files, in a child as the mount may hang, and looks each up through the mount, so that the kernel
knows it; the daemon, which must not touch its own mount, is then given their names, a batch at a time.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, field

import click

from dmfs import privileges
from dmfs.cli import bounded, client
from dmfs.cli.output import amount, note
from dmfs.cli.owners import owner_of
from dmfs.cli.paths import find_daemon, is_inside, real_mountpoint
from dmfs.cli.walk import Seen, count, walk
from dmfs.errors import NotMounted, UserError
from dmfs.fuse import mounting
from dmfs.metrics import WarmProgress
from dmfs.protocol import MAX_BATCH, MAX_REQUEST, path_to_text
from dmfs.runtime import MountRecord, records
from dmfs.types import MiB

ANSWER_TIMEOUT = 5.0  # seconds after which a daemon that says nothing is taken for hung
PATIENCE = 10.0  # seconds without a file found, after which we ask whether it is the daemon that hangs
LINGER = (
    0.2  # seconds a batch that is not full waits for more: a source whose stats are slow must not starve the copying
)
BATCH_BYTES = 256 * MiB  # a batch is full with these, so that the daemon is soon asked for the next
MAX_REASONS = 1000  # failures kept to be named
MAX_NAMED = 8  # of these on the terminal


@click.command("warm")
@click.argument("mountpoint")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--push", is_flag=True, help="Also put the bytes into the page cache, as far as there is free memory.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object.")
def command(mountpoint: str, paths: tuple[str, ...], push: bool, as_json: bool) -> int:
    """Copy files of the mount at MOUNTPOINT to its cache now, so that the job
    that reads them finds them there.

    Each PATH is a file, or a directory with all that is below it. A relative
    PATH is taken from the current directory if that leads into the mount, else
    from MOUNTPOINT. Symbolic links given are followed within the mount; those
    found below a PATH are skipped, as are other mounts.

    Takes as long as the source takes. Ctrl-C ends it; what has been copied
    stays. What the cache has no room for is no error: it is counted. Root can
    warm the mounts of all users.

    \b
    Examples:
      # the whole dataset
      dmfs warm /tmp/imagenet .
      dmfs warm /tmp/imagenet train/n01440764 /tmp/imagenet/val
      # of a mount with --io pagecache: the first read is as fast as memory
      dmfs warm /tmp/imagenet val --push
    """
    path = real_mountpoint(mountpoint)
    owner = owner_of(mounting.find_mount(path))
    if owner is not None:
        with contextlib.suppress(OSError):  # a root that may not, as in a container, is told that it is not its mount
            privileges.become(owner)
    record = _find(path)
    client.ask(record, {"op": "status"}, timeout=ANSWER_TIMEOUT)  # or the first look into the mount would hang
    outcome = _warm(record, (path, _device(path), paths), push=push)
    if as_json:
        click.echo(json.dumps(outcome.as_dict(), indent=2))
    else:
        _print(outcome, push=push)
    return UserError.exit_code if outcome.counts.failures else 0


@dataclass(slots=True)
class _Outcome:
    """What has been done so far.

    Attributes:
        counts: of the batches that are over, and failures of the walk.
        skipped: what is neither a file nor a directory of this mount.
        seen, seen_bytes: files of the batches that are over, whatever became of them.
        empty: those of them without any bytes, which need no push.
        has_waited: the user has been told that the source does not answer.
    """

    counts: WarmProgress = field(default_factory=WarmProgress)
    skipped: int = 0
    seen: int = 0
    seen_bytes: int = 0
    empty: int = 0
    has_waited: bool = False

    def add(self, batch: list[Seen], progress: WarmProgress) -> None:
        """A batch is over."""
        for name, number in progress.numbers().items():
            setattr(self.counts, name, getattr(self.counts, name) + number)
        self.counts.failed += progress.failed[: MAX_REASONS - len(self.counts.failed)]
        self.seen += len(batch)
        self.seen_bytes += sum(file.size for file in batch)
        self.empty += sum(not file.size for file in batch)

    def add_failure(self, path: str, reason: str) -> None:
        """A path could not be looked at."""
        self.counts.failures += 1
        if len(self.counts.failed) < MAX_REASONS:
            self.counts.failed.append((path, reason))

    def as_dict(self) -> dict[str, object]:
        """The answer to --json, see docs/configuration.md."""
        failed = [{"path": path, "reason": reason} for path, reason in self.counts.failed]
        return {**self.counts.numbers(), "skipped": self.skipped, "failed": failed}


def _find(path: str) -> MountRecord:
    try:
        return find_daemon(path)
    except NotMounted:
        for record in records():
            if is_inside(path, record.mountpoint):
                raise NotMounted(f"{path} is inside the mount {record.mountpoint}: give that as MOUNTPOINT") from None
        raise


def _device(path: str) -> int:
    """st_dev of what the mount shows."""
    mount = mounting.find_mount(path)
    if mount is None or mount.fs_type != "fuse.dmfs":
        raise NotMounted(f"{path} is not mounted any more: its daemon is about to end")
    major, minor = mount.device.split(":")
    return os.makedev(int(major), int(minor))


def _warm(record: MountRecord, where: tuple[str, int, tuple[str, ...]], *, push: bool) -> _Outcome:
    outcome = _Outcome()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(bounded.Stream(walk, *where))
        show = _show_nothing
        if sys.stderr.isatty():
            with privileges.raised():  # Python may be in a folder that is root's alone
                from dmfs.cli.bar import Bar  # rich

            show = stack.enter_context(Bar(stack.enter_context(bounded.Stream(count, *where)))).show
        run = stack.enter_context(client.WarmRun(record))

        def show_progress(progress: WarmProgress) -> None:
            show(outcome.seen + progress.files, outcome.seen_bytes + progress.bytes)

        while batch := _next_batch(found, outcome, record):
            show_progress(WarmProgress())
            names = [os.fsencode(file.path) for file in batch]
            outcome.add(batch, run.warm(names, push=push, on_progress=show_progress))
    return outcome


def _show_nothing(files: int, size: int) -> None:
    pass


def _next_batch(found: bounded.Stream[Seen], outcome: _Outcome, record: MountRecord) -> list[Seen]:
    """The next files to ask for, none at the end; what is found besides goes into `outcome`.

    Waits for a source that hangs, as any reader would, but not for a daemon that does.
    """
    batch: list[Seen] = []
    size = length = 0
    started = 0.0
    # One more path, each byte as \udcff, fits into the other half of a request.
    while len(batch) < MAX_BATCH and size < BATCH_BYTES and length < MAX_REQUEST // 2:
        try:
            seen = found.take(started + LINGER - time.monotonic() if batch else PATIENCE)
        except EOFError:
            break
        except TimeoutError:
            if batch:
                break
            client.ask(record, {"op": "status"}, timeout=ANSWER_TIMEOUT)
            if not outcome.has_waited:
                note(f"waiting for the source: dmfs status {shlex.quote(record.mountpoint)} says for which answers")
                outcome.has_waited = True
            continue
        if seen.kind == "skipped":
            outcome.skipped += 1
        elif seen.kind == "failed":
            outcome.add_failure(seen.path, seen.reason)
        else:
            started = started or time.monotonic()
            batch.append(seen)
            size += seen.size
            length += len(json.dumps(path_to_text(os.fsencode(seen.path)))) + 2
    return batch


def _print(outcome: _Outcome, *, push: bool) -> None:
    for path, reason in outcome.counts.failed[:MAX_NAMED]:
        note(f"{path or '.'}: {reason}")
    for sentence in _describe(outcome, push=push):
        click.echo(sentence)


def _describe(outcome: _Outcome, *, push: bool) -> list[str]:
    """What has come of it, in sentences."""
    counts = outcome.counts
    if not (outcome.seen or outcome.skipped or counts.failures):
        return ["There are no files."]
    sentences = []
    if counts.files:
        are = "is" if counts.files == 1 else "are"
        sentence = (
            f"{_files(counts.files)} ({amount(counts.bytes)}) {are} in the cache: "
            f"{counts.fetched:,} copied now, {counts.files - counts.fetched:,} there before"
        )
        sentences.append(sentence + (f"; {counts.pushed:,} pushed into memory." if push else "."))
    if counts.no_room:
        sentences.append(
            f"No room in the cache for {_files(counts.no_room)}, to be read from the source: "
            "mount with more (--cache PATH:SIZE)."
        )
    if counts.no_memory:
        sentences.append(f"Not pushed for want of free memory: {_files(counts.no_memory)}.")
    left = counts.files - outcome.empty - counts.pushed - counts.no_memory
    if push and left > 0:
        sentences.append(f"Not pushed, being read just then or dropped by the kernel meanwhile: {_files(left)}.")
    if outcome.skipped:
        sentences.append(f"Skipped as no files: {outcome.skipped:,} (symbolic links, devices, other mounts).")
    if counts.failures:
        more = f"; --json names up to {MAX_REASONS:,}" if counts.failures > MAX_NAMED else ""
        sentences.append(f"Not to be had from the source: {counts.failures:,}{more}.")
    return sentences


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number:,} files"
