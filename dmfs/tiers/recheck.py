"""The second look at young files before their copies are published.

A file system that keeps times in whole seconds (Lustre does) can take two writes within one: the second then changes
bytes but no time. So where a file's ctime is close to the newest the source has shown, its copy serves readers at
once, but gets its name only after one more stat, two seconds later. Files that are older than that, and everything
under `--immutable`, skip this.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from dmfs.errors import TierUnavailable
from dmfs.tiers.source import MOVED, Source
from dmfs.tiers.store import Copy, Store
from dmfs.types import NANOSECONDS, Clock, DataFile

DELAY = 2.0  # seconds between the fill and the second look: more than the coarsest time stamp, one second
CLOSE_TO_NEWEST = 60 * NANOSECONDS  # a ctime this near to the newest one seen is young, by the source's own clock
A_DAY = 86_400.0  # seconds; older than this by the local clock is not young, however quiet the source was since
BATCH = 64  # files looked at in one thread call


@dataclass(frozen=True, slots=True)
class _Item:
    file: DataFile
    store: Store
    copy: Copy
    due: float


class Recheck:
    """The queue of complete copies that wait for their second look. Holds no descriptors.

    `on_changed` is called with a file that turned out to have changed, after its copy was discarded.

    Attributes:
        finished: set when `run` has returned after `drain`.
    """

    def __init__(
        self, source: Source, *, clock: Clock, is_immutable: bool, on_changed: Callable[[DataFile], None]
    ) -> None:
        self._source = source
        self._clock = clock
        self._is_immutable = is_immutable
        self._on_changed = on_changed
        self._items: deque[_Item] = deque()
        self.finished = trio.Event()
        self._wake = trio.Event()
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._items)

    def is_needed(self, file: DataFile) -> bool:
        """True if this version is too young to be published without a second look."""
        if self._is_immutable:
            return False
        ctime_ns = file.version.ctime_ns
        if ctime_ns < self._source.newest_ctime_ns - CLOSE_TO_NEWEST:
            return False
        return self._clock.wall() - ctime_ns / NANOSECONDS < A_DAY

    def add(self, file: DataFile, store: Store, copy: Copy) -> None:
        """Look at this file again in a while, then publish its copy."""
        self._items.append(_Item(file, store, copy, self._clock.monotonic() + DELAY))
        self._wake.set()

    async def run(self) -> None:
        """Work through the queue until cancelled or, after `drain`, until it is empty."""
        while self._items or not self._is_draining:
            if not self._items:
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            delay = self._items[0].due - self._clock.monotonic()
            if delay > 0:
                await trio.sleep(delay)
            await self._look_at(self._take_due())
        self.finished.set()

    def drain(self) -> None:
        """`run` returns once the queue is empty. What cannot be looked at then (the source is away) is discarded."""
        self._is_draining = True
        self._wake.set()

    def _take_due(self) -> list[_Item]:
        now = self._clock.monotonic()
        items: list[_Item] = []
        while self._items and self._items[0].due <= now and len(items) < BATCH:
            items.append(self._items.popleft())
        return items

    async def _look_at(self, items: list[_Item]) -> None:
        # A copy may have been given up meanwhile, and another one of the same file may have taken its place.
        items = [item for item in items if item.store.get(item.file.key) is item.copy]
        if not items:
            return
        results = await self._source.lstat_many([item.file.path for item in items])
        unchanged = []
        for item, result in zip(items, results, strict=True):
            if not isinstance(result, OSError) and self._source.is_version(result, item.file):
                unchanged.append(item)
            elif self._is_draining or not isinstance(result, OSError) or result.errno in MOVED:
                self._discard(item)
            else:  # the source is away: ask again
                self._items.append(_Item(item.file, item.store, item.copy, self._clock.monotonic() + DELAY))
        published = await trio.to_thread.run_sync(_publish, unchanged, abandon_on_cancel=True)
        for item, is_published in zip(unchanged, published, strict=True):
            if item.store.get(item.file.key) is not item.copy:
                continue
            if is_published:
                item.store.published(item.file.key)
            else:
                self._discard(item)

    def _discard(self, item: _Item) -> None:
        if item.store.get(item.file.key) is item.copy:
            item.store.discard(item.file.key)
            self._on_changed(item.file)


def _publish(items: list[_Item]) -> list[bool]:
    """Give copies their names; False where the tier failed. Blocks."""
    results = []
    for item in items:
        assert item.copy.temp is not None
        try:
            item.store.publish(item.file.key, item.copy.digest, item.copy.temp)
            results.append(True)
        except TierUnavailable:
            results.append(False)
    return results
