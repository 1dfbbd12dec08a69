"""Where the bytes of a file come from: a copy on a tier, a running fill, or the source. The policy of a node.

A hit costs one dictionary look-up and one system call, in the event loop (`read_nowait`). Everything else waits in
`read`. Callers need not open or close: that only adds pins, starts small files early and ends what nobody wants any
more.

A fault of a tier never reaches a reader: the next tier or the source serves it. The source's own errors do reach it.
"""

import contextlib
import math
import os
from typing import TYPE_CHECKING, NamedTuple

import trio

from dmfs.errors import CopyDamaged, StaleFile, TierUnavailable, without_traceback
from dmfs.log import ErrorLog
from dmfs.metrics import Metrics, Served
from dmfs.tiers.descriptors import LRU, Descriptor, kept_open
from dmfs.tiers.fill import Fill, Finished, Outcome
from dmfs.tiers.pagedrop import PageDropper
from dmfs.tiers.pending import Pending
from dmfs.tiers.queue import FillQueue
from dmfs.tiers.recheck import Recheck
from dmfs.tiers.source import Source
from dmfs.tiers.store import Copy, NoRoom, Store
from dmfs.tiers.threads import CallThreads
from dmfs.types import PIECE_SIZE, Clock, DataFile, FileKey

if TYPE_CHECKING:
    from collections.abc import Callable

UNOPENED_FOR = 30.0  # seconds after its last read for which a file counts as open whose opens are not seen
COPY_WAIT = 0.5  # seconds an open waits for a tier to take a small file that is here; a disk that hangs holds nobody up
ASK_AGAIN = 1.0  # seconds after which a fill that somebody waits for is put into the queue again
DRAIN_LIMIT = 15.0  # seconds an unmount waits for late publications; a source that hangs longer loses these copies


class OpenCopy(NamedTuple):
    """A copy that is open, and where it lies."""

    store: Store
    descriptor: Descriptor


class Manager:
    """The order of tiers, and the fills between them.

    Attributes:
        drops_served_pages: the front end keeps what it is given, so that the pages of copies are of no more use.
        hands_copies_over: the front end hands the kernel complete copies at open, so that it is worth waiting for one.
        on_changed: called with a file when it turned out that the source has another version now.
        on_copy_gone: called with a key when its copy has been removed from its tier.
    """

    def __init__(
        self,
        source: Source,
        stores: list[Store],
        *,
        metrics: Metrics,
        errors: ErrorLog,
        clock: Clock,
        is_immutable: bool,
        open_wait: int,
        open_wait_seconds: float,
        pieces_in_flight: int,
        fills: int,
        threads: int,
    ) -> None:
        self.source = source
        self.stores = stores
        self.drops_served_pages = False
        self.hands_copies_over = False
        self.on_changed: Callable[[DataFile], None] = lambda file: None
        self.on_copy_gone: Callable[[FileKey], None] = lambda key: None
        self._metrics = metrics
        self._errors = errors
        self._open_wait = open_wait
        self._open_wait_seconds = open_wait_seconds
        # Reads from a tier have threads of their own: they must not queue behind a source that hangs.
        self._tier_threads = CallThreads(threads, clock)
        self._copies: LRU[FileKey, OpenCopy] = LRU(kept_open())
        self._fills: dict[FileKey, Fill] = {}
        self._users: dict[FileKey, int] = {}
        self._unopened: dict[FileKey, float] = {}  # read without being open, and when last
        self._clock = clock
        self._recheck = Recheck(
            source, clock=clock, is_immutable=is_immutable, on_changed=lambda file: self.on_changed(file)
        )
        for store in stores:
            store.on_removed = self._copy_removed
        self._pages = PageDropper(clock)
        self._queue = FillQueue(self._is_open, pieces=pieces_in_flight, fills=fills)

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Scan the tiers and run fills until cancelled. Call `drain` before that, or young copies are lost."""
        async with trio.open_nursery() as nursery:
            for store in self.stores:
                nursery.start_soon(store.scan)
            nursery.start_soon(self._recheck.run)
            nursery.start_soon(self._close_unopened)
            nursery.start_soon(self._pages.run)
            nursery.start_soon(self.source.metadata.watch)
            nursery.start_soon(self.source.data.watch)
            task_status.started()
            await trio.sleep_forever()

    async def drain(self) -> None:
        """Wait until the copies of young files are published, at most `DRAIN_LIMIT` seconds."""
        self._recheck.drain()
        with trio.move_on_after(DRAIN_LIMIT):
            await self._recheck.finished.wait()

    def shut_down(self) -> None:
        """Drop what is still under way, after `run` was cancelled. Blocks briefly."""
        for fill in list(self._fills.values()):
            self._drop(fill)
        for store in self.stores:
            store.clear()

    def statistics(self) -> dict[str, object]:
        """`fills` of `dmfs status`."""
        counts = self._metrics.fills
        queued = sum(not fill.has_started for fill in self._fills.values())
        return {
            "active": len(self._fills) - queued,
            "queued": queued,
            "done": counts.done,
            "failed": counts.failed,
            "bytes": counts.bytes,
        }

    # ---- open and close

    def open_nowait(self, file: DataFile) -> bool:
        """Open a file that needs no wait: a copy is here, or it is empty. False: nothing was done, call `open`."""
        key = file.key
        if file.version.size and not self.has_copy(key):
            return False
        self._pin(key)
        self._metrics.local.opens += 1
        return True

    async def open(self, file: DataFile) -> Served | None:
        """Open a file; `close` must follow if this returns.

        Returns:
            Where reads of this handle are counted, wherever they find the bytes by then; None: by what each finds.

        A small file is fetched before this returns, so that its first read is a hit; of a larger one only the version
        is checked.

        Raises:
            StaleFile: the source has another version now.
            OSError: the source's own, if it refused to open the file. An error in reading is left to the read.
        """
        await self._wait_scanned()
        if self.open_nowait(file):
            return None
        self._pin(file.key)
        is_small = file.version.size <= self._open_wait
        try:
            with trio.move_on_after(self._open_wait_seconds if is_small else math.inf):
                if not (is_small and await self._fill_now(file)):
                    await self.source.open(file)
        except BaseException:
            self.close(file)
            raise
        self._metrics.source_served.opens += 1
        return self._metrics.source_served if is_small else None

    def close(self, file: DataFile) -> None:
        """Take back one open."""
        key = file.key
        for store in self.stores:
            store.unpin(key)
        users = self._users[key] - 1
        if users:
            self._users[key] = users
            return
        del self._users[key]
        self._unused(key)

    def _unused(self, key: FileKey) -> None:
        """Nobody has a file open any more: end what went on for its readers."""
        if not self.has_copy(key):
            self._copies.drop(key)  # given up while it was open
        fill = self._fills.get(key)
        if fill is None:
            self.source.close(key)
        elif fill.is_idle:
            self._drop(fill)

    def has_copy(self, key: FileKey) -> bool:
        """True if a complete copy is on one of the tiers."""
        for store in self.stores:  # noqa: SIM110 - on every open, and any() takes three times as long
            if store.get(key) is not None:
                return True
        return False

    def hold_copy(self, file: DataFile) -> bool:
        """Keep the copy of a file, if there is one, until `close`. Counted as no open."""
        if not self.has_copy(file.key):
            return False
        self._pin(file.key)
        return True

    async def _wait_scanned(self) -> None:
        """A miss is one only when every copy that was left here is known."""
        for store in self.stores:
            if not store.scanned.is_set():  # waiting for what has come costs a turn of the event loop
                await store.scanned.wait()

    def _pin(self, key: FileKey) -> None:
        self._users[key] = self._users.get(key, 0) + 1
        for store in self.stores:
            store.pin(key)

    def _is_open(self, fill: Fill) -> bool:
        return fill.file.key in self._users or fill.file.key in self._unopened

    def _note_read(self, key: FileKey) -> None:
        if key not in self._users:
            self._unopened[key] = self._clock.monotonic()

    async def _close_unopened(self) -> None:
        """Where opens are not seen, a file counts as closed when nobody has asked for it in a while."""
        while True:
            await trio.sleep(UNOPENED_FOR / 4)
            self._close_unread_since(self._clock.monotonic() - UNOPENED_FOR)

    def _close_unread_since(self, latest: float) -> None:
        # No part of the task above, whose frame would hold the last fill, with its descriptors, while it sleeps.
        for key, last in list(self._unopened.items()):
            fill = self._fills.get(key)
            if last < latest and not (fill and fill.has_waiters):
                del self._unopened[key]
                if key not in self._users:
                    self._unused(key)

    async def fetch(self, file: DataFile) -> bool:
        """Have a whole file in a tier: True if its copy is here now, False if no tier has room for it.

        A cancelled caller leaves; what it began goes on.

        Raises:
            StaleFile: the source has another version now.
            OSError: the source's own.
        """
        await self._wait_scanned()
        self._pin(file.key)  # counts as open, so it comes before what nobody wants any more
        try:
            for _ in self.stores:
                if self.has_copy(file.key) or not file.version.size:
                    return True
                fill = self._fills.get(file.key) or self._start_fill(file)
                if fill is None:
                    return False
                await self._wait_settled(fill)
                if isinstance(fill.error, OSError | StaleFile) and not self.has_copy(file.key):
                    raise without_traceback(fill.error)
            return self.has_copy(file.key)
        finally:
            self.close(file)

    async def _wait_settled(self, fill: Fill) -> None:
        if fill.piece_count == 1:
            self._ask(fill, range(1))  # small files may take every place, as those do that are opened
        while not fill.settled.is_set():
            self._queue.add(fill)  # again, as a fill that the source hung in has left the queue
            with trio.move_on_after(ASK_AGAIN):
                await fill.settled.wait()

    # ---- reading

    def read_nowait(self, file: DataFile, view: memoryview, offset: int) -> Served | None:
        """Fill `view` from what is here, and say where that was: the counters to add to.

        None if it would wait or cannot be: call `read`. The range lies within the file and is not empty.
        """
        opened = self.open_copy_nowait(file)
        if opened is not None:
            if not opened.store.read_nowait(opened.descriptor, view, offset):
                return None
            if self.drops_served_pages:
                self._pages_served(opened, offset, len(view))
            return self._metrics.local
        fill = self._fills.get(file.key)
        if fill is not None and fill.read_nowait(view, offset):
            self._note_read(file.key)
            return self._metrics.source_served
        return None

    async def read(self, file: DataFile, view: memoryview, offset: int) -> Served:
        """Fill `view`, and say from where. The range lies within the file and is not empty.

        A cancelled reader leaves at once; a thread may still write into `view`, so it must not be used for anything
        else then.

        Raises:
            StaleFile: these bytes are of a version that is not to be had any more.
            OSError: the source's own.
        """
        self._note_read(file.key)
        await self._wait_scanned()
        # A fill may end while it is waited for, well (then its copy is here) or because its tier failed (then the next
        # one is asked): once for each tier, and twice more for a damaged copy and the end of the fill that mends it.
        for _ in range(len(self.stores) + 2):
            try:
                if await self._read_copy(file, view, offset):
                    return self._metrics.local
            except CopyDamaged:
                continue  # it is gone, and will be fetched anew
            except TierUnavailable:
                break  # it may be good when the tier is: not fetched anew
            fill = self._fills.get(file.key) or self._start_fill(file)
            if fill is None:
                break
            with contextlib.suppress(TierUnavailable):
                if await self._read_fill(fill, view, offset):
                    return self._metrics.source_served
        await self._read_source(file, view, offset)
        return self._metrics.source_served

    async def seek(self, file: DataFile, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE, from a copy (whose holes are whole pieces) or the source.

        Raises as `read`.
        """
        await self._wait_scanned()
        with contextlib.suppress(TierUnavailable):
            opened = await self.open_copy(file)
            if opened is not None:
                return await self._tier_threads.run(file.path, opened.store.seek, opened.descriptor, offset, whence)
        return await self.source.seek(file, offset, whence)

    def open_copy_nowait(self, file: DataFile) -> OpenCopy | None:
        """The copy of a file, opened. None if there is none, or a disk would have to be waited for."""
        key = file.key
        opened = self._copies.get(key)
        if opened is not None:
            return opened
        for store in self.stores:
            if store.get(key) is not None:
                descriptor = store.open_copy_nowait(key)
                if descriptor is not None:
                    opened = OpenCopy(store, descriptor)
                    self._copies.add(key, opened)
                    return opened
        return None

    async def _read_copy(self, file: DataFile, view: memoryview, offset: int) -> bool:
        """Read from a copy in a thread.

        False if there is none. Raises TierUnavailable; CopyDamaged once it is discarded.
        """
        opened = await self.open_copy(file)
        if opened is None:
            return False
        store, descriptor = opened
        copy = store.get(file.key)
        try:
            await self._tier_threads.run(file.path, store.read, descriptor, view, offset)
        except TierUnavailable as exc:
            self._copy_failed(file.key, store, copy, exc)
            raise
        self._pages_served(opened, offset, len(view))
        return True

    def pages_pushed(self, opened: OpenCopy, size: int) -> None:
        """The kernel has got a whole copy of `size` bytes, and keeps it."""
        self._pages_served(opened, 0, size)

    def _pages_served(self, opened: OpenCopy, offset: int, length: int) -> None:
        if self.drops_served_pages and opened.store.read_mode != "memory":
            self._pages.served(opened.descriptor, offset, length)

    async def open_copy(self, file: DataFile) -> OpenCopy | None:
        """The copy of a file, opened; None if there is none.

        Raises:
            TierUnavailable: its tier failed; CopyDamaged among it, once the copy is discarded.
        """
        opened = self.open_copy_nowait(file)
        if opened is not None:
            return opened
        for store in self.stores:
            copy = store.get(file.key)
            if copy is None:
                continue
            try:
                descriptor = await self._tier_threads.run(file.path, store.open_copy, file.key, copy)
            except TierUnavailable as exc:
                self._copy_failed(file.key, store, copy, exc)
                raise
            opened = OpenCopy(store, descriptor)
            if store.get(file.key) is copy:
                self._copies.add(file.key, opened)
            return opened
        return None

    def _copy_failed(self, key: FileKey, store: Store, copy: Copy | None, exc: TierUnavailable) -> None:
        self._copies.drop(key)
        self._tier_failed(store, exc)
        if isinstance(exc, CopyDamaged) and copy is not None and store.get(key) is copy:
            store.discard(key)

    async def _read_fill(self, fill: Fill, view: memoryview, offset: int) -> bool:
        """Read by way of a running fill. False if it has ended meanwhile. Raises what the fill says."""
        first, last = offset // PIECE_SIZE, (offset + len(view) - 1) // PIECE_SIZE
        waits = self._ask(fill, range(first, last + 1))
        # A read within the first piece of a large file may be a look at its header: that piece is all it costs.
        is_small = fill.file.version.size <= self._open_wait
        if (last > 0 or is_small) and fill.outcome is Outcome.RUNNING:
            self._queue.add(fill)
        for wait in waits:
            await wait.wait()
        if not fill.read_nowait(view, offset):
            read_in_thread = fill.reader(view, offset)
            if read_in_thread is None:
                return False
            try:
                await self._tier_threads.run(fill.file.path, read_in_thread)
            except TierUnavailable as exc:
                self._tier_failed(fill.store, exc)
                raise
        return True

    async def _read_source(self, file: DataFile, view: memoryview, offset: int) -> None:
        """No tier can take this file: read the range from the source."""
        try:
            descriptor = await self.source.open(file)
            await self.source.data.run(file.path, self.source.read_into, descriptor, file, offset, view)
        except StaleFile:
            self.source.close(file.key)
            self.on_changed(file)
            raise

    # ---- fills

    def _start_fill(self, file: DataFile) -> Fill | None:
        """A fill into the first tier that has room; None if there is none."""
        for store in self.stores:
            reservation = store.reserve(file.version.size)
            if reservation is not None:
                fill = Fill(
                    file,
                    store,
                    reservation,
                    self.source,
                    can_publish_at_once=lambda file: not self._recheck.is_needed(file),
                    on_progress=self._progressed,
                    on_finished=self._complete,
                    on_error=self._failed,
                )
                self._fills[file.key] = fill
                return fill
        return None

    async def _fill_now(self, file: DataFile) -> bool:
        """Fetch a whole file, into the first tier that takes it; False if none does.

        An error in reading is left to the reader: only a failed opening is raised.
        """
        for _ in self.stores:
            fill = self._fills.get(file.key) or self._start_fill(file)
            if fill is None:
                return False
            with contextlib.suppress(TierUnavailable):
                await self._wait_whole(fill)
                if self.hands_copies_over:
                    with trio.move_on_after(COPY_WAIT):
                        await fill.settled.wait()  # its bytes are shown before they are written
                return True
            if self.has_copy(file.key):
                return True
        return False

    async def _wait_whole(self, fill: Fill) -> None:
        """Wait until every piece is here, or the source gave an error in reading. Raises what the fill says else."""
        waits = self._ask(fill, range(fill.piece_count))
        if fill.outcome is Outcome.RUNNING:
            self._queue.add(fill)
        for wait in waits:
            await wait.done.wait()
            if wait.error is None:
                continue
            if not isinstance(wait.error, OSError) or fill.has_open_failed:
                raise without_traceback(wait.error)
            return

    def _ask(self, fill: Fill, pieces: range) -> list[Pending]:
        """Have pieces fetched before all that nobody waits for: the waits for those that are not here."""
        waits = []
        for piece in pieces:
            wait = fill.wait_for(piece)
            if wait is not None:
                waits.append(wait)
                self._queue.ask(fill, piece)
        return waits

    def _progressed(self, fill: Fill, size: int) -> None:
        self._metrics.fills.bytes += size
        if fill.outcome is Outcome.BROKEN and not self._is_wanted(fill):
            self._drop(fill)

    def _is_wanted(self, fill: Fill) -> bool:
        return self._is_open(fill) or fill.has_waiters

    def _failed(self, fill: Fill, exc: Exception) -> None:
        """A fill is over or broken. One that still has its pieces stays, for those who have the file open."""
        self._queue.remove(fill)
        if not isinstance(exc, NoRoom):
            self._metrics.fills.failed += 1
        if isinstance(exc, TierUnavailable):
            self._tier_failed(fill.store, exc)
        elif not isinstance(exc, StaleFile):
            path = os.fsdecode(fill.file.path)
            if isinstance(exc, OSError):
                self._errors.add(f"source: {path}: {exc.strerror}", kind=f"source read {exc.errno}")
            else:
                self._errors.add(f"fault in copying {path}: {exc!r}", exc, kind=f"copying {type(exc).__name__}")
        if fill.outcome is Outcome.OVER:
            self._forget(fill)
        elif not self._is_wanted(fill):
            self._drop(fill)
        if isinstance(exc, StaleFile):
            self.on_changed(fill.file)

    def _complete(self, fill: Fill, finished: Finished) -> None:
        file, store = fill.file, fill.store
        copy, descriptor = fill.hand_over(finished)
        store.add(file.key, copy)
        self._copies.add(file.key, OpenCopy(store, descriptor))
        self._metrics.fills.done += 1
        if self.drops_served_pages and store.read_mode != "memory":
            self._pages.filled(store, file.key, copy)
        self._queue.remove(fill)
        self._forget(fill)
        if not finished.is_published:
            self._recheck.add(file, store, copy)

    def _drop(self, fill: Fill) -> None:
        """Nobody wants this fill any more."""
        self._queue.remove(fill)
        self._forget(fill)
        fill.end(TierUnavailable("dropped"))  # a reader that is left, without a handle, begins anew

    def _forget(self, fill: Fill) -> None:
        del self._fills[fill.file.key]
        self.source.close(fill.file.key)

    def _tier_failed(self, store: Store, exc: TierUnavailable) -> None:
        if isinstance(exc, NoRoom):
            return
        if not isinstance(exc, CopyDamaged):
            store.report(exc.__cause__)
        self._errors.add(str(exc), kind=f"tier {store.path} {type(exc).__name__}")

    def _copy_removed(self, key: FileKey) -> None:
        if key not in self._users:  # who has it open goes on with the version that was opened
            self._copies.drop(key)
        self.on_copy_gone(key)
