"""Dropping the pages of copies: which ranges, when, and never in the event loop's thread."""

import os
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from dmfs.tiers import pagedrop
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.pagedrop import PageDropper
from dmfs.tiers.store import Copy
from dmfs.types import Clock


class Place:
    """Stands for a Store with one copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.copy: Copy | None = Copy(0, 0)

    def get(self, key: bytes) -> Copy | None:
        return self.copy

    def open_copy(self, key: bytes, copy: Copy) -> Descriptor:
        return Descriptor(os.open(self.path, os.O_RDONLY))


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were dropped so far."""
    ranges: list[tuple[int, int]] = []

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        assert threading.current_thread() is not threading.main_thread()
        ranges.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return ranges


@pytest.fixture
def dropper(nursery: trio.Nursery) -> PageDropper:
    dropper = PageDropper(Clock(monotonic=trio.current_time))
    nursery.start_soon(dropper.run)
    return dropper


def opened() -> Descriptor:
    return Descriptor(os.open(os.devnull, os.O_RDONLY))


async def wait_for(ranges: list[tuple[int, int]], count: int) -> None:
    with trio.fail_after(60):
        while len(ranges) < count:  # noqa: ASYNC110 - a thread adds to it, and the clock jumps
            await trio.sleep(0.01)


async def test_ranges_that_follow_each_other_are_one_call(
    autojump_clock: MockClock, dropper: PageDropper, dropped: list[tuple[int, int]]
) -> None:
    copy, other = opened(), opened()
    for offset in range(0, 5000, 1000):
        dropper.served(copy, offset, 1000)
    dropper.served(other, 0, 7)
    dropper.served(copy, 5000, 1000)
    assert dropped == []
    await wait_for(dropped, 3)
    assert dropped == [(0, 5000), (0, 7), (5000, 1000)]
    dropper.served(other, 7, 1)
    await wait_for(dropped, 4)
    assert dropped[3:] == [(7, 1)]


async def test_a_fresh_copy_is_dropped_when_the_disk_has_it(
    autojump_clock: MockClock, dropper: PageDropper, dropped: list[tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / "copy").write_bytes(b"x")
    place, gone = Place(tmp_path / "copy"), Place(tmp_path / "copy")
    began = trio.current_time()
    for where in (gone, place):
        copy = where.copy
        assert copy is not None
        dropper.filled(where, b"key", copy)  # type: ignore[arg-type]
    gone.copy = None  # given up meanwhile
    await wait_for(dropped, 1)
    assert trio.current_time() - began >= pagedrop.WRITTEN_AFTER
    await trio.sleep(5)
    assert dropped == [(0, 0)]


async def test_what_waits_is_bounded(
    autojump_clock: MockClock, dropper: PageDropper, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagedrop, "MAX_RANGES", 3)
    copy = opened()
    for offset in range(0, 50, 10):
        dropper.served(copy, offset, 1)
    await wait_for(dropped, 3)
    await trio.sleep(5)
    assert len(dropped) == 3
