"""Young files: readers are served at once, but a copy gets its name only after the source was looked at once more."""

import errno
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from dmfs.tiers.recheck import DELAY
from dmfs.types import MiB
from tests.operations.harness import Node, run_node, until
from tests.support.files import expect_content, write_file

LARGE = 9 * MiB + 5
SIZES = [300_000, 5 * MiB, LARGE]
OLD, NEW = 1, 2

pytestmark = pytest.mark.parametrize("size", SIZES)


@pytest.fixture
def moving_clock(mock_clock: MockClock) -> MockClock:
    """Trio's clock, which runs as ever, and jumps when a test says so."""
    mock_clock.rate = 1.0
    return mock_clock


def make(base: Path, size: int, version: int = OLD) -> Path:
    """File 0, written just now, in the source below a node's base."""
    (base / "source").mkdir(exist_ok=True)
    path = base / "source/f"
    write_file(path, 0, size, version)
    return path


async def read_cold(node: Node, size: int, version: int = OLD) -> None:
    """Read a file, and wait until all of it is in the tier."""
    expect_content(await node.read_file(b"f"), 0, 0, size, version)
    await node.wait_idle()


async def look_again(node: Node) -> None:
    """Let the time pass that the second look waits for, and wait for it."""
    node.clock.advance(DELAY + 0.01)
    await until(lambda: not len(node.manager._recheck) and not node.source.metadata.waiting(), "it has been looked at")
    await until(
        lambda: all(copy.temp is None for store in node.stores for copy in store._copies.values()), "it is published"
    )


async def test_young_file_is_published_later(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        assert node.copies() == []
        assert len(node.temp_files()) == 1
        counts, local = node.metrics.source.as_dict(), node.metrics.local.bytes
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        assert node.metrics.source.as_dict() == counts, "it serves at once"
        assert node.metrics.local.bytes - local == size
        await look_again(node)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.stats == counts["stats"] + 1
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        assert node.metrics.source.bytes == size


async def test_old_file_is_published_at_once(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock) as node:
        await read_cold(node, size)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.stats == 1


async def test_immutable_source_is_not_looked_at_again(tmp_path: Path, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, is_fresh=True, is_immutable=True) as node:
        await read_cold(node, size)
        await node.assert_settled()
        assert len(node.copies()) == 1
        node.clock.advance(1e6)
        await node.read_file(b"f")
        assert node.metrics.source.stats == 1


async def test_rewritten_within_the_same_second(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    """The fill saw the old bytes; the copy must never get its name, and the next open sees the new ones."""
    path = make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        make(tmp_path, size, NEW)
        await look_again(node)
        await node.assert_settled()
        assert node.copies() == []
        assert list((node.dataset_folder() / "objects").iterdir()) == []
        await read_cold(node, size, NEW)
        await look_again(node)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert path.stat().st_size == size


@pytest.mark.parametrize("change", ["rewrite", "unlink", "replace"])
async def test_who_has_it_open_goes_on(tmp_path: Path, size: int, change: str, moving_clock: MockClock) -> None:
    """The second look finds a change: what is open keeps its bytes, as it does when an old file changes."""
    path = make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True, read_mode="thread") as node:
        await read_cold(node, size)
        handle = await node.open(b"f")
        if change == "rewrite":
            make(tmp_path, size, NEW)
        elif change == "unlink":
            path.unlink()
        else:
            write_file(path.with_name("g"), 0, size, NEW)
            path.with_name("g").rename(path)
        await look_again(node)
        expect_content(await node.read_all(handle, size), 0, 0, size, OLD)
        node.operations.release(handle)
        await node.assert_settled()
        if change == "unlink":
            with pytest.raises(FileNotFoundError):
                await node.open(b"f")
        else:
            await read_cold(node, size, NEW)


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EACCES])
async def test_source_that_cannot_be_asked_is_asked_again(
    tmp_path: Path, size: int, code: int, moving_clock: MockClock
) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        fault = node.faults.fail("stat", code)
        node.clock.advance(DELAY + 0.01)
        await fault.wait_entered()
        await until(lambda: len(node.manager._recheck) == 1, "it is queued again")
        assert node.copies() == []
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        node.faults.clear()
        await look_again(node)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.bytes == size


async def test_drain_publishes_what_is_left(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.manager.drain)
            await until(lambda: node.manager._recheck._is_draining, "it drains")
            node.clock.advance(DELAY)
        await node.assert_settled()
        assert len(node.copies()) == 1
    async with run_node(tmp_path) as node:
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        assert node.metrics.source.bytes == 0


async def test_drain_does_not_wait_for_a_source_that_is_away(
    tmp_path: Path, size: int, moving_clock: MockClock
) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        node.faults.fail("stat", errno.EIO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.manager.drain)
            await until(lambda: node.manager._recheck._is_draining, "it drains")
            node.clock.advance(DELAY)
        await node.assert_settled()
        assert node.copies() == []


async def test_drain_does_not_wait_for_a_source_that_hangs(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        held = node.faults.hold("stat")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.manager.drain)
            await until(lambda: node.manager._recheck._is_draining, "it drains")
            node.clock.advance(DELAY)
            await held.wait_entered()
            # More than is waited for; the limit of the test itself is further away.
            nursery.cancel_scope.deadline = trio.current_time() + 100
            moving_clock.jump(15.1)
    assert node.copies() == []


async def test_read_while_the_copy_gets_its_name(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    """Its name changes in a thread; a reader that opens the copy just then must not take it for lost."""
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True, read_mode="thread") as node:
        await read_cold(node, size)
        node.manager._copies.drop(next(iter(node.stores[0]._copies)))
        held = node.tier_faults[0].hold("published")
        node.clock.advance(DELAY + 0.01)
        await held.wait_entered()
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        held.release()
        await look_again(node)
        await node.assert_settled()
        assert len(node.copies()) == 1
        assert node.metrics.source.bytes == size
        assert node.errors.entries() == []


@pytest.mark.parametrize("when", ["publish", "published"])
async def test_given_up_while_it_gets_its_name(tmp_path: Path, size: int, when: str, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        held = node.tier_faults[0].hold(when)
        node.clock.advance(DELAY + 0.01)
        await held.wait_entered()
        assert node.stores[0].evict(next(iter(node.stores[0]._copies)))
        held.release()
        await look_again(node)
        await node.assert_settled()
        assert list((node.dataset_folder() / "objects").iterdir()) == []
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)


async def test_tier_that_fails_when_the_copy_gets_its_name(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        node.tier_faults[0].fail("publish", errno.EIO)
        await look_again(node)
        await node.assert_settled()
        assert node.copies() == []
        node.tier_faults[0].clear()
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)


async def test_killed_before_the_second_look(tmp_path: Path, size: int, moving_clock: MockClock) -> None:
    """What was not published is not there after a restart."""
    make(tmp_path, size)
    async with run_node(tmp_path, trio_clock=moving_clock, is_fresh=True) as node:
        await read_cold(node, size)
        leftovers = node.temp_files()
        for name in leftovers:
            os.link(node.dataset_folder() / "tmp" / name, tmp_path / name)
    for name in leftovers:
        (tmp_path / name).rename(node.dataset_folder() / "tmp" / name)
    async with run_node(tmp_path, trio_clock=moving_clock) as node:
        assert node.temp_files() == []
        await node.assert_settled()
        await read_cold(node, size)
        assert node.metrics.source.bytes == size
