"""Gives memory back where the same bytes lie in it twice: in the page cache of a copy and in that of the mount.

Where readers are served by the mount's own page cache, the pages of the copy below have done their work once they were
sent. They are dropped a moment later, in a thread and several at once, since that costs a system call each. Pages that
are still being written to the disk cannot be dropped (the attempt makes the kernel begin to write them), so the copy of
a fill is dropped once more later. Does nothing on a memory file system, whose pages are the only ones.
"""

import contextlib
import os
from collections import deque
from dataclasses import dataclass

import trio

from dmfs.errors import TierUnavailable
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.store import Copy, Store
from dmfs.types import Clock, FileKey

DELAY = 0.1  # seconds after the first range was served until it is dropped with those that came since
WRITTEN_AFTER = 10.0  # seconds in which the kernel has written what it was made to begin to write
MAX_RANGES = 1024  # that wait, each holding a descriptor; more are left to the kernel's own reclaim
MAX_FRESH = 65_536  # fresh copies that wait, the same
BATCH = 512  # fresh copies in one thread call


@dataclass(slots=True)
class _Range:
    descriptor: Descriptor
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Fresh:
    due: float
    store: Store
    key: FileKey
    copy: Copy


class PageDropper:
    """Drops the pages of copies that were served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranges: list[_Range] = []
        self._fresh: deque[_Fresh] = deque()
        self._something = trio.Event()
        self._limiter = trio.CapacityLimiter(1)  # of its own: it must not queue behind other threads

    def served(self, descriptor: Descriptor, offset: int, length: int) -> None:
        """A range of a copy was sent to the kernel, which keeps it."""
        if self._ranges:
            last = self._ranges[-1]
            if last.descriptor is descriptor and last.end == offset:
                last.end += length
                return
            if len(self._ranges) >= MAX_RANGES:
                return
        else:
            self._something.set()
        self._ranges.append(_Range(descriptor, offset, offset + length))

    def filled(self, store: Store, key: FileKey, copy: Copy) -> None:
        """A copy was written just now: its pages can be dropped when the disk has them."""
        if len(self._fresh) < MAX_FRESH:
            self._fresh.append(_Fresh(self._clock.monotonic() + WRITTEN_AFTER, store, key, copy))
            self._something.set()

    async def run(self) -> None:
        """Drop pages until cancelled."""
        while True:
            if not self._ranges and not self._fresh:
                self._something = trio.Event()
                await self._something.wait()
            await trio.sleep(DELAY if self._ranges else WRITTEN_AFTER / 10)
            await self._drop_what_is_due()

    async def _drop_what_is_due(self) -> None:
        # No part of `run`, whose frame would hold the last descriptors, and the blocks of copies given up, for ever.
        ranges, self._ranges = self._ranges, []
        fresh = self._take_due()
        if ranges or fresh:
            await trio.to_thread.run_sync(_drop, ranges, fresh, abandon_on_cancel=True, limiter=self._limiter)

    def _take_due(self) -> list[_Fresh]:
        now = self._clock.monotonic()
        due: list[_Fresh] = []
        while self._fresh and self._fresh[0].due <= now and len(due) < BATCH:
            fresh = self._fresh.popleft()
            if fresh.store.get(fresh.key) is fresh.copy:
                due.append(fresh)
        return due


def _drop(ranges: list[_Range], fresh: list[_Fresh]) -> None:
    with contextlib.suppress(OSError):  # no pages are worth an error
        for part in ranges:
            os.posix_fadvise(part.descriptor.fd, part.start, part.end - part.start, os.POSIX_FADV_DONTNEED)
    for copy in fresh:
        with contextlib.suppress(OSError, TierUnavailable):
            descriptor = copy.store.open_copy(copy.key, copy.copy)
            os.posix_fadvise(descriptor.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # a length of 0 is all of it
