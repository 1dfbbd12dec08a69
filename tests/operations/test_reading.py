"""Reading through a node: every byte right, each source byte fetched once, and when a fill starts and ends."""

import errno
import os
from pathlib import Path

import pytest
import trio

from dmfs.errors import StaleFile
from dmfs.tiers.store import ReadMode
from dmfs.types import PIECE_SIZE, KiB, MiB
from tests.operations.harness import Node, open_descriptors, raises_errno, run_node, until
from tests.support.files import content, expect_content, write_file

SIZES = [0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 327_680, 2 * MiB + 1, 9 * MiB + 1]
REQUESTS = [1, 4096, 65_536, 131_072, MiB, 16 * MiB]
LARGE = 9 * MiB + 5  # three pieces, and more than is fetched before an open returns
MODES: list[ReadMode] = ["memory", "nowait", "thread"]


def make(node_folder: Path, *sizes: int) -> None:
    """Files f0, f1... of these sizes in the source below a node's base."""
    folder = node_folder / "source"
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write_file(folder / f"f{number}", number, size)


# ---- bytes


@pytest.mark.parametrize("mode", MODES)
async def test_every_request_size(tmp_path: Path, mode: ReadMode) -> None:
    make(tmp_path, *SIZES)
    async with run_node(tmp_path, read_mode=mode) as node:
        for number, size in enumerate(SIZES):
            for request in REQUESTS:
                if size / request > 600:
                    continue
                data = await node.read_file(b"f%d" % number, request)
                expect_content(data, number, 0, size)
        await node.assert_settled()
        assert node.metrics.source.bytes == sum(SIZES)
        assert node.metrics.source.opens == len(SIZES) - 1, "an empty file is not opened"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capacities", [(1 << 40,), ()], ids=["with a tier", "without"])
async def test_every_offset(tmp_path: Path, mode: ReadMode, capacities: tuple[int, ...]) -> None:
    make(tmp_path, *SIZES)
    async with run_node(tmp_path, read_mode=mode, capacities=capacities) as node:
        for number, size in enumerate(SIZES):
            handle = await node.open(b"f%d" % number)
            for offset in {0, 1, size // 2, size - 7, size - 1, size, size + 1, PIECE_SIZE - 3, 1 << 62}:
                for length in (1, 7, 14, 4096, 5 * MiB):
                    if offset < 0:
                        continue
                    data = await node.read(handle, offset, length)
                    expect_content(data, number, offset, max(0, min(length, size - offset)))
            node.operations.release(handle)
        await node.assert_settled()


@pytest.mark.parametrize("capacities", [(1 << 40,), ()], ids=["with a tier", "without"])
async def test_source_that_delivers_short(tmp_path: Path, capacities: tuple[int, ...]) -> None:
    make(tmp_path, 327_680, 2 * MiB + 1)
    async with run_node(tmp_path, capacities=capacities) as node:
        node.faults.shorten(10_000)
        for number, size in enumerate([327_680, 2 * MiB + 1]):
            for request in (4096, 131_072, MiB):
                expect_content(await node.read_file(b"f%d" % number, request), number, 0, size)
        if capacities:
            assert node.metrics.source.bytes == 327_680 + 2 * MiB + 1


async def test_no_byte_of_another_file(tmp_path: Path) -> None:
    """A04: buffers are used again; what the source did not deliver must not be filled with what they had before."""
    make(tmp_path)
    (tmp_path / "source/secret").write_bytes(b"S" * LARGE)
    (tmp_path / "source/f0").write_bytes(b"f" * LARGE)
    async with run_node(tmp_path) as node:
        await node.read_file(b"secret")
        handle = await node.open(b"f0")
        assert await node.read(handle, 0, 10) == b"f" * 10
        os.truncate(tmp_path / "source/f0", 5 * MiB)
        for offset in range(PIECE_SIZE, LARGE, MiB):
            with pytest.raises(StaleFile):
                assert b"S" not in await node.read(handle, offset, MiB)
        node.operations.release(handle)
        assert await node.read_file(b"f0") == b"f" * 5 * MiB


async def test_files_are_not_mixed_up(tmp_path: Path) -> None:
    """A17: several files interleaved, in an order that jumps."""
    sizes = [5 * MiB + number for number in range(6)]
    make(tmp_path, *sizes)
    async with run_node(tmp_path) as node:
        handles = [await node.open(b"f%d" % number) for number in range(6)]
        for step in range(200):
            number = step * 5 % 6
            offset = step * 1_234_567 % (sizes[number] - 5000)
            expect_content(await node.read(handles[number], offset, 5000), number, offset, 5000)
        for handle in handles:
            node.operations.release(handle)
        await node.assert_settled()


async def test_sparse_file_stays_sparse(tmp_path: Path) -> None:
    make(tmp_path, 4096, 4096, 4096)
    holes = {0: 64 * MiB, 1: 8 * MiB, 2: PIECE_SIZE}  # ends in a hole, the like on the edge of a piece, all in one
    for number, size in holes.items():
        os.truncate(tmp_path / f"source/f{number}", size)
    os.truncate(tmp_path / "source/f2", 0)
    os.truncate(tmp_path / "source/f2", PIECE_SIZE)
    async with run_node(tmp_path) as node:
        for number, size in holes.items():
            data = await node.read_file(b"f%d" % number)
            assert data == (content(number, 0, 4096) if number != 2 else bytes(4096)) + bytes(size - 4096)
        await node.assert_settled()
        assert sorted(copy.stat().st_size for copy in node.copies()) == sorted(holes.values())
        assert sum(copy.stat().st_blocks * 512 for copy in node.copies()) <= 2 * PIECE_SIZE + 64 * KiB
        for number, size in holes.items():
            handle = await node.open(b"f%d" % number)
            assert await node.operations.lseek(handle, PIECE_SIZE - 1, os.SEEK_HOLE) in (PIECE_SIZE - 1, PIECE_SIZE)
            with raises_errno(errno.ENXIO):
                await node.operations.lseek(handle, size, os.SEEK_DATA)
            node.operations.release(handle)


# ---- once


@pytest.mark.slow
@pytest.mark.parametrize("size", [100 * KiB, 5 * MiB, LARGE])
async def test_simultaneous_readers_cost_one_read(tmp_path: Path, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        handles: list[int] = []

        async def read(request: int) -> None:
            handle = await node.open(b"f0")
            handles.append(handle)
            expect_content(await node.read_all(handle, size, request), 0, 0, size)

        async with trio.open_nursery() as nursery:
            for number in range(32):
                nursery.start_soon(read, (MiB, 128 * KiB, 300 * KiB)[number % 3])
        await node.wait_idle()
        assert node.metrics.source.bytes == size
        assert node.metrics.source.opens == 1
        assert node.metrics.source.stats == 1
        for handle in handles:
            node.operations.release(handle)
        await node.assert_settled()
        served = [node.metrics.local.bytes, node.metrics.source_served.bytes]
        assert sum(served) == 32 * size, "what readers got, from here or there, is what was counted"
        assert node.metrics.local.opens + node.metrics.source_served.opens == 32


async def test_second_reading_costs_the_source_nothing(tmp_path: Path) -> None:
    make(tmp_path, 0, 10, LARGE)
    async with run_node(tmp_path) as node:
        for number, size in enumerate([0, 10, LARGE]):
            expect_content(await node.read_file(b"f%d" % number), number, 0, size)
        await node.wait_idle()
        counts, local = node.metrics.source.as_dict(), node.metrics.local.bytes
        for number, size in enumerate([0, 10, LARGE]):
            expect_content(await node.read_file(b"f%d" % number), number, 0, size)
        assert node.metrics.source.as_dict() == counts
        assert node.metrics.local.bytes - local == 10 + LARGE


@pytest.mark.parametrize("mode", MODES)
async def test_restart_finds_the_copies(tmp_path: Path, mode: ReadMode) -> None:
    make(tmp_path, 0, 10, 5 * MiB, LARGE)
    sizes = [0, 10, 5 * MiB, LARGE]
    async with run_node(tmp_path) as node:
        for number in range(4):
            await node.read_file(b"f%d" % number)
        await node.assert_settled()
    async with run_node(tmp_path, read_mode=mode) as node:
        for number, size in enumerate(sizes):
            expect_content(await node.read_file(b"f%d" % number), number, 0, size)
            if size:
                handle = await node.open(b"f%d" % number)
                assert await node.operations.lseek(handle, 0, os.SEEK_HOLE) == size
                node.operations.release(handle)
        counts = node.metrics.source
        assert (counts.opens, counts.reads, counts.bytes) == (0, 0, 0)
        await node.assert_settled()


async def test_hard_links_share_a_copy(tmp_path: Path) -> None:
    make(tmp_path, 10_000)
    (tmp_path / "source/other").hardlink_to(tmp_path / "source/f0")
    async with run_node(tmp_path) as node:
        for name in (b"f0", b"other", b"f0"):
            expect_content(await node.read_file(name), 0, 0, 10_000)
            assert (await node.stat(name)).nlink == 2
        assert (await node.lookup(b"f0")).node == (await node.lookup(b"other")).node
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.bytes == 10_000


# ---- when a fill starts


async def test_header_of_a_large_file_costs_one_piece(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f0")
        for offset in (0, 4096, PIECE_SIZE - 512):
            expect_content(await node.read(handle, offset, 512), 0, offset, 512)
        await until(lambda: node.metrics.fills.bytes == PIECE_SIZE, "the piece is written")
        assert node.metrics.source.bytes == PIECE_SIZE
        assert len(node.temp_files()) == 1
        assert node.stores[0].statistics()["used_bytes"] == PIECE_SIZE, "status says what du says"
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == []
        await until(lambda: not open_descriptors(tmp_path / "source"), "the source's file is closed")


async def test_read_past_the_first_piece_fetches_all(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, LARGE - 100, 100), 0, LARGE - 100, 100)
        await node.wait_idle()
        assert node.metrics.source.bytes == LARGE
        assert len(node.copies()) == 1
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE)
        assert node.metrics.source.bytes == LARGE
        node.operations.release(handle)
        await node.assert_settled()


async def test_whole_fill_goes_on_after_the_close(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("read", path=b"f0", offset=2 * PIECE_SIZE)
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, PIECE_SIZE, 10), 0, PIECE_SIZE, 10)
        await held.wait_entered()
        node.operations.release(handle)
        held.release()
        await node.assert_settled()
        assert len(node.copies()) == 1


@pytest.mark.parametrize("size", [10, PIECE_SIZE, 8 * MiB])
async def test_open_fetches_a_small_file(tmp_path: Path, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f0")
        view = memoryview(bytearray(size))
        assert node.operations.read_nowait(handle, 0, view) == size, "its first read is a hit"
        assert node.metrics.source.bytes == size
        node.operations.release(handle)
        await node.assert_settled()


async def test_open_waits_for_a_slow_source_so_long(tmp_path: Path) -> None:
    make(tmp_path, 5 * MiB)
    async with run_node(tmp_path, open_wait_seconds=0.02) as node:
        held = node.faults.hold("read", path=b"f0")
        handle = await node.open(b"f0")
        assert held.entered.is_set()
        assert node.metrics.source.bytes == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.read, handle, 5 * MiB - 10, 10)
            held.release()
        expect_content(await node.read_all(handle, 5 * MiB), 0, 0, 5 * MiB)
        node.operations.release(handle)
        await node.assert_settled()
        assert node.metrics.source.bytes == 5 * MiB


async def test_without_open_wait_a_small_file_comes_by_reads(tmp_path: Path) -> None:
    make(tmp_path, 300_000)
    async with run_node(tmp_path, open_wait=0) as node:
        handle = await node.open(b"f0")
        assert node.metrics.source.bytes == 0
        expect_content(await node.read_all(handle, 300_000, 4096), 0, 0, 300_000)
        node.operations.release(handle)
        await node.assert_settled()
        assert node.metrics.source.bytes == 300_000
        assert len(node.copies()) == 1


async def test_only_piece_is_kept_although_its_reader_left(tmp_path: Path) -> None:
    """A file of one piece is whole when its first piece is here: not dropped in flight, and not fetched twice."""
    make(tmp_path, 300_000)
    async with run_node(tmp_path, open_wait=0) as node:
        held = node.faults.hold("read", path=b"f0")
        handle = await node.open(b"f0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.read, handle, 0, 4096)
            await held.wait_entered()
            nursery.cancel_scope.cancel()
        node.operations.release(handle)
        held.release()
        await node.assert_settled()
        assert len(node.copies()) == 1
        expect_content(await node.read_file(b"f0"), 0, 0, 300_000)
        assert node.metrics.source.bytes == 300_000


# ---- cancelled readers


async def cancel_while(node: Node, call: str, offset: int) -> None:
    """Cancel a read that waits for a call of the source."""
    held = node.faults.hold(call, path=b"f0" if call != "check" else None)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def open_and_read() -> None:
                handle = await node.open(b"f0")
                try:
                    await node.read(handle, offset, 4096)
                finally:
                    node.operations.release(handle)

            nursery.start_soon(open_and_read)
            await held.wait_entered()
            scope.cancel()
    node.faults.clear()


@pytest.mark.parametrize("call", ["stat", "open", "read", "check"])
@pytest.mark.parametrize("size", [300_000, 5 * MiB, LARGE])
async def test_cancelled_reader_leaves_nothing_behind(tmp_path: Path, call: str, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        await cancel_while(node, call, 0)
        await node.assert_settled()
        expect_content(await node.read_file(b"f0"), 0, 0, size)
        await node.assert_settled()
        assert len(node.copies()) == 1


@pytest.mark.parametrize("size", [300_000, 5 * MiB, LARGE])
async def test_cancelled_reader_does_not_stop_the_fill(tmp_path: Path, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        await cancel_while(node, "read", size - 4096)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.bytes == size


async def test_cancelled_reader_among_others(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("read", path=b"f0")
        handle, other = await node.open(b"f0"), await node.open(b"f0")
        async with trio.open_nursery() as nursery:

            async def read_on() -> None:
                expect_content(await node.read(other, 0, 4096), 0, 0, 4096)

            nursery.start_soon(read_on)
            with trio.CancelScope() as scope:
                nursery.start_soon(held.wait_entered)
                async with trio.open_nursery() as inner:
                    inner.start_soon(node.read, handle, 0, 4096)
                    await held.wait_entered()
                    scope.cancel()
            node.operations.release(handle)
            held.release()
        expect_content(await node.read_all(other, LARGE), 0, 0, LARGE)
        node.operations.release(other)
        await node.assert_settled()
        assert node.metrics.source.bytes == LARGE


async def test_dropped_while_its_temporary_file_is_made(tmp_path: Path) -> None:
    """The last reader leaves between the opening of the source and the copying."""
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.tier_faults[0].hold("create")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                handle = await node.open(b"f0")
                nursery.start_soon(node.read, handle, 0, 4096)
                await held.wait_entered()
                scope.cancel()
        node.operations.release(handle)
        again = await node.open(b"f0")
        node.tier_faults[0].clear()
        expect_content(await node.read_all(again, LARGE), 0, 0, LARGE)
        node.operations.release(again)
        await node.assert_settled()
        assert len(node.copies()) == 1


async def test_old_fill_that_fails_leaves_the_new_one_alone(tmp_path: Path) -> None:
    """Dropped with a piece in flight, opened again; the old piece's error is nobody's any more."""
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("read", path=b"f0", times=1, error=errno.EIO)
        handle = await node.open(b"f0")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.read, handle, 0, 4096)
                await held.wait_entered()
                scope.cancel()
        node.operations.release(handle)
        handle = await node.open(b"f0")
        expect_content(await node.read(handle, 0, 4096), 0, 0, 4096)
        fills = dict(node.manager._fills)
        assert len(fills) == 1
        held.release()
        await until(lambda: not node.source.data.waiting(), "the old call has ended")
        assert node.manager._fills == fills
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE)
        node.operations.release(handle)
        await node.assert_settled()
