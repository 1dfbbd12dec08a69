"""Tiers that are full, fail, or lose what they had: never the reader's problem, and never a wrong account of space."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from dmfs.errors import TierUnavailable
from dmfs.tiers.store import RETRY_AFTER, ReadMode
from dmfs.types import PIECE_SIZE, KiB, MiB
from tests.operations.harness import Node, open_descriptors, run_node, until
from tests.support.files import expect_content, write_file

LARGE = 9 * MiB + 5  # three pieces
SMALL = 300_000
MIDDLE = 5 * MiB  # two pieces, fetched before the open returns
MODES: list[ReadMode] = ["memory", "nowait", "thread"]


def make(base: Path, *sizes: int) -> None:
    """Files f0, f1... in the source below a node's base."""
    (base / "source").mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write_file(base / f"source/f{number}", number, size)


async def read_right(node: Node, number: int, size: int) -> None:
    """Open, read and check a file."""
    expect_content(await node.read_file(b"f%d" % number), number, 0, size)


# ---- no room


async def test_second_tier_takes_what_the_first_cannot(tmp_path: Path) -> None:
    make(tmp_path, MIDDLE, MIDDLE, SMALL)
    async with run_node(tmp_path, capacities=(6 * MiB, 20 * MiB)) as node:
        for number, size in enumerate([MIDDLE, MIDDLE, SMALL]):
            await read_right(node, number, size)
            await node.wait_idle()
        assert [len(node.copies(tier)) for tier in (0, 1)] == [2, 1], "the small one still goes to the first"
        for number, size in enumerate([MIDDLE, MIDDLE, SMALL]):
            await read_right(node, number, size)
        assert node.metrics.source.bytes == 2 * MIDDLE + SMALL
        assert node.errors.entries() == [], "no room is no error"
        await node.assert_settled()
    async with run_node(tmp_path, capacities=(6 * MiB, 20 * MiB)) as node:
        for number, size in enumerate([MIDDLE, MIDDLE, SMALL]):
            await read_right(node, number, size)
        assert node.metrics.source.bytes == 0


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_no_room_anywhere(tmp_path: Path, size: int) -> None:
    """A10: streamed from the source; several readers at several places, forwards and backwards."""
    make(tmp_path, size)
    async with run_node(tmp_path, capacities=(100 * KiB, 200 * KiB)) as node:
        await read_right(node, 0, size)
        assert node.metrics.source.bytes == size
        handle = await node.open(b"f0")

        async def read(offsets: list[int]) -> None:
            for offset in offsets:
                length = min(100_000, size - offset)
                expect_content(await node.read(handle, offset, 100_000), 0, offset, length)

        offsets = list(range(0, size, 100_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, offsets)
            nursery.start_soon(read, offsets[::-1])
            nursery.start_soon(read, sorted(offsets, key=lambda offset: offset * 7919 % 101))
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies(0) == node.copies(1) == []
        assert node.metrics.fills.failed == 0
        assert node.errors.entries() == []


async def test_file_that_does_not_fit_does_not_stop_later_ones(tmp_path: Path) -> None:
    make(tmp_path, LARGE, SMALL)
    async with run_node(tmp_path, capacities=(MiB,)) as node:
        await read_right(node, 0, LARGE)
        await read_right(node, 1, SMALL)
        await node.assert_settled()
        assert len(node.copies()) == 1


def free_space(folder: Path) -> int:
    """Bytes that are free on the file system of a folder."""
    fs = os.statvfs(folder)
    return fs.f_bavail * fs.f_frsize


async def test_min_free_is_left(tmp_path: Path) -> None:
    make(tmp_path, SMALL, MIDDLE)
    async with run_node(tmp_path, capacities=(1 << 40, 1 << 40), min_free=0) as node:
        node.stores[0]._min_free = free_space(tmp_path) + (1 << 30)
        await read_right(node, 0, SMALL)
        await read_right(node, 1, MIDDLE)
        await node.assert_settled()
        assert [len(node.copies(tier)) for tier in (0, 1)] == [0, 2]
        assert node.metrics.source.bytes == SMALL + MIDDLE, "the bytes read for the first tier went to the second"
        assert [store.statistics()["state"] for store in node.stores] == ["full", "ok"]
        assert (node.errors.entries(), node.metrics.fills.failed) == ([], 0), "no room is no error"


async def test_what_min_free_refuses_does_not_stop_smaller_files(tmp_path: Path) -> None:
    make(tmp_path, LARGE, SMALL)
    async with run_node(tmp_path, min_free=0) as node:
        node.tier_faults[0].fail("no_room", errno.ENOSPC, offset=LARGE)
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, LARGE - 10, 10), 0, LARGE - 10, 10)
        assert node.stores[0].statistics()["state"] == "full"
        await read_right(node, 1, SMALL)
        await node.wait_idle()
        assert len(node.copies()) == 1
        assert node.stores[0].statistics()["state"] == "full", "to files of that size"
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE)
        assert len(node.copies()) == 1
        node.tier_faults[0].clear()
        node.clock.advance(RETRY_AFTER)
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE)
        await node.wait_idle()
        assert len(node.copies()) == 2
        assert node.stores[0].statistics()["state"] == "ok"
        node.operations.release(handle)
        await node.assert_settled()


# ---- faults in writing


@pytest.mark.parametrize("call", ["create", "write", "sums", "publish"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("tiers", [1, 2])
async def test_fault_in_mid_fill(tmp_path: Path, call: str, code: int, size: int, tiers: int) -> None:
    """A08: the reader gets its bytes, nothing partial is published, nothing is left, and later files are cached."""
    if call == "sums" and size == SMALL:
        return
    make(tmp_path, size, SMALL)
    async with run_node(tmp_path, capacities=(1 << 40,) * tiers) as node:
        fault = node.tier_faults[0].fail(call, code, skip=1 if call == "write" and size != SMALL else 0)
        await read_right(node, 0, size)
        await until(lambda: fault.entered.is_set() and not node.manager._fills, "the fill has failed")
        await node.assert_settled()
        assert node.copies() == []
        assert node.stores[0].statistics()["state"] == (
            "full" if code == errno.ENOSPC else "failing: Input/output error"
        )
        assert [entry["count"] for entry in node.errors.entries()] == [1]
        await read_right(node, 1, SMALL)
        await node.wait_idle()
        if tiers == 2:
            assert len(node.copies(1)) >= 1
        node.tier_faults[0].clear()
        node.clock.advance(RETRY_AFTER)
        await read_right(node, 0, size)
        await read_right(node, 1, SMALL)
        await node.assert_settled()
        assert len(node.copies(0)) + (len(node.copies(1)) if tiers == 2 else 0) == 2
        if tiers == 1:
            assert node.stores[0].statistics()["state"] == "ok"


async def test_readers_of_a_fill_that_fails(tmp_path: Path) -> None:
    """Sixteen readers at sixteen places when the tier fails."""
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.tier_faults[0].hold("write", error=errno.EIO)
        handle = await node.open(b"f0")

        async def read(offset: int) -> None:
            expect_content(await node.read(handle, offset, 10_000), 0, offset, 10_000)

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(read, number * 600_000)
            await held.wait_entered()
            held.release()
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == []


async def test_reader_of_two_pieces_when_the_tier_fails_between_them(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path, pieces_in_flight=1) as node:
        node.tier_faults[0].fail("write", errno.EIO, skip=1)
        handle = await node.open(b"f0")
        offset = PIECE_SIZE - 100
        expect_content(await node.read(handle, offset, 200), 0, offset, 200)
        node.operations.release(handle)
        await node.assert_settled()


async def test_nobody_waits_for_a_fill_that_has_ended(tmp_path: Path) -> None:
    """A reader that comes to its second piece after the end would wait for ever."""
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, 0, 10), 0, 0, 10)
        (fill,) = node.manager._fills.values()
        node.manager._drop(fill)
        with pytest.raises(TierUnavailable):
            fill.wait_for(1)
        assert fill.reader(memoryview(bytearray(10)), 0) is None
        assert not fill.read_nowait(memoryview(bytearray(10)), 0)
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE)
        node.operations.release(handle)
        await node.assert_settled()


async def test_tier_that_fails_all_the_time(tmp_path: Path) -> None:
    """B04: every call fails; every read is right all the same, warm and cold."""
    make(tmp_path, SMALL, LARGE, SMALL)
    async with run_node(tmp_path, read_mode="thread") as node:
        await read_right(node, 0, SMALL)
        await node.wait_idle()
        for call in ("create", "write", "sums", "publish", "open_copy", "read_copy"):
            node.tier_faults[0].fail(call, errno.EIO)
        for _ in range(3):
            for number, size in enumerate([SMALL, LARGE, SMALL]):
                await read_right(node, number, size)
            node.clock.advance(RETRY_AFTER)
        assert node.stores[0].statistics()["state"] == "failing: Input/output error"
        node.tier_faults[0].clear()
        node.clock.advance(RETRY_AFTER)
        before = node.metrics.source.bytes
        await read_right(node, 0, SMALL)
        assert node.metrics.source.bytes == before, "a copy outlives the bad time of its disk"
        await read_right(node, 2, SMALL)
        await node.assert_settled()
        assert node.stores[0].statistics()["state"] == "ok"
        assert len(node.copies()) == 2


async def test_no_descriptor_left_is_no_reason_to_give_up_a_copy(tmp_path: Path) -> None:
    make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, SMALL)
        await node.wait_idle()
    async with run_node(tmp_path, read_mode="thread") as node:
        node.tier_faults[0].fail("open_copy", errno.EMFILE)
        await read_right(node, 0, SMALL)
        node.tier_faults[0].clear()
        assert len(node.copies()) == 1
        assert node.metrics.source.bytes == SMALL
        await read_right(node, 0, SMALL)
        assert node.metrics.source.bytes == SMALL


async def test_temporary_file_that_cannot_be_read(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path, read_mode="thread") as node:
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, 0, 100), 0, 0, 100)
        await until(lambda: not node.source.data.waiting(), "the piece is written")
        node.tier_faults[0].fail("read_copy", errno.EIO)
        expect_content(await node.read(handle, 0, 100), 0, 0, 100)
        node.tier_faults[0].clear()
        expect_content(await node.read(handle, 0, 100), 0, 0, 100)
        node.operations.release(handle)
        await node.assert_settled()


# ---- copies that are not what they were


def cut(copy: Path) -> None:
    """Shorter than its file."""
    os.truncate(copy, copy.stat().st_size // 2)


def remove(copy: Path) -> None:
    """Removed by somebody."""
    copy.unlink()


@pytest.mark.parametrize("harm", [cut, remove])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("mode", MODES)
async def test_harmed_copy_is_fetched_again(
    tmp_path: Path, harm: Callable[[Path], None], size: int, mode: ReadMode
) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, size)
        await node.assert_settled()
    async with run_node(tmp_path, read_mode=mode) as node:
        (copy,) = node.copies()
        harm(copy)
        handle = await node.open(b"f0")
        expect_content(await node.read_all(handle, size), 0, 0, size)
        await node.wait_idle()
        assert node.metrics.source.bytes == size
        node.operations.release(handle)
        await node.assert_settled()
        await read_right(node, 0, size)
        assert node.metrics.source.bytes == size, "mended"
        assert node.stores[0].statistics()["state"] == "ok", "a damaged copy says nothing about its tier"


@pytest.mark.parametrize("mode", MODES)
async def test_many_readers_of_a_harmed_copy(tmp_path: Path, mode: ReadMode) -> None:
    """All find it at once, some of them late, when others have fetched it again."""
    make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, SMALL)
        await node.assert_settled()
    async with run_node(tmp_path, read_mode=mode, open_wait=0) as node:
        cut(node.copies()[0])
        late = node.tier_faults[0].hold("read_copy", times=1)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read_right, node, 0, SMALL)
            await late.wait_entered()
            await until(lambda: node.metrics.fills.done, "it has been fetched again")
            late.release()
        await node.assert_settled()
        assert node.metrics.source.bytes == SMALL
        assert len(node.copies()) == 1


async def test_only_piece_is_dropped_and_wanted_again(tmp_path: Path) -> None:
    """A damaged copy is being fetched again for a reader that leaves."""
    make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, SMALL)
        await node.wait_idle()
        cut(node.copies()[0])
        held = node.faults.hold("read", path=b"f0")
        handle = await node.open(b"f0")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.read, handle, SMALL - 10, 10)
                await held.wait_entered()
                scope.cancel()
        node.operations.release(handle)
        node.faults.clear()
        await node.assert_settled()
        assert len(node.copies()) == 1
        await read_right(node, 0, SMALL)


async def test_seek_never_shows_the_fault_of_a_tier(tmp_path: Path) -> None:
    make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, SMALL)
        await node.wait_idle()
    async with run_node(tmp_path, read_mode="thread") as node:
        handle = await node.open(b"f0")
        node.tier_faults[0].fail("open_copy", errno.EIO)
        assert await node.operations.lseek(handle, 0, os.SEEK_HOLE) == SMALL
        node.operations.release(handle)


# ---- giving up


async def test_eviction_respects_pins(tmp_path: Path) -> None:
    make(tmp_path, SMALL, LARGE)
    async with run_node(tmp_path) as node:
        await read_right(node, 0, SMALL)
        await read_right(node, 1, LARGE)
        await node.wait_idle()
        handle, other = await node.open(b"f0"), await node.open(b"f0")
        store = node.stores[0]
        pinned = node.operations._files[handle].file.key
        free = next(key for key in store._copies if key != pinned)
        assert not store.evict(pinned)
        assert store.evict(free)
        assert not store.evict(free), "it is gone"
        node.operations.release(handle)
        assert not store.evict(pinned)
        expect_content(await node.read_all(other, SMALL), 0, 0, SMALL)
        node.operations.release(other)
        assert store.evict(pinned)
        await node.assert_settled()
        assert node.copies() == []
        assert list((node.dataset_folder() / "objects").iterdir()) == [], "the digests went with it"
        assert store.statistics()["used_bytes"] == 0
        await until(lambda: not open_descriptors(node.tiers[0]), "no descriptor holds its blocks")
        await read_right(node, 0, SMALL)
