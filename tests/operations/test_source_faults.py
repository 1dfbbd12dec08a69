"""What a reader sees when the source errs or changes under it: its own errno, and never bytes of two versions."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from dmfs.errors import StaleFile
from dmfs.types import PIECE_SIZE, MiB
from tests.operations.harness import Node, open_descriptors, raises_errno, run_node, until
from tests.support.files import content, expect_content, write_file

LARGE = 13 * MiB + 5  # four pieces
SMALL = 300_000
MIDDLE = 5 * MiB  # two pieces, fetched before the open returns
OLD, NEW = 1, 2  # versions

ERRORS = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.ENOENT]


def make(base: Path, size: int, name: str = "f") -> Path:
    """File 0 of this size in the source below a node's base."""
    (base / "source").mkdir(exist_ok=True)
    path = base / "source" / name
    write_file(path, 0, size, OLD)
    return path


# ---- errors


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_error_in_reading_reaches_the_reader_and_leaves_nothing(tmp_path: Path, code: int, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        fault = node.faults.fail("read", code, path=b"f")
        handle = await node.open(b"f")
        with raises_errno(code):
            await node.read(handle, size - 100, 100)
        with raises_errno(code):
            await node.read(handle, 0, 100)
        assert fault.entered.is_set()
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == []
        assert node.errors.entries()
        node.faults.clear()
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        await node.assert_settled()
        assert len(node.copies()) == 1


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_error_that_passes_while_the_file_is_open(tmp_path: Path, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        node.faults.fail("read", errno.EIO, path=b"f", times=1)
        handle = await node.open(b"f")
        if size == LARGE:
            with raises_errno(errno.EIO):
                await node.read(handle, 0, 100)
        expect_content(await node.read_all(handle, size), 0, 0, size, OLD)
        node.operations.release(handle)
        await node.assert_settled()
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        await node.assert_settled()


async def test_only_readers_of_that_piece_get_the_error(tmp_path: Path) -> None:
    make(tmp_path, LARGE)
    async with run_node(tmp_path, pieces_in_flight=8) as node:
        handle = await node.open(b"f")
        held = node.faults.hold("read", path=b"f", offset=PIECE_SIZE, error=errno.EIO, times=1)
        answers: list[object] = []

        async def read(offset: int, *, fails: bool) -> None:
            if fails:
                with raises_errno(errno.EIO):
                    await node.read(handle, offset, 100)
            else:
                expect_content(await node.read(handle, offset, 100), 0, offset, 100, OLD)
            answers.append(offset)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lambda: read(PIECE_SIZE + 10, fails=True))
            await held.wait_entered()
            for offset in (0, 2 * PIECE_SIZE + 10, LARGE - 100):
                nursery.start_soon(lambda offset=offset: read(offset, fails=False))  # type: ignore[misc]
            await until(lambda: len(answers) == 3, "the other pieces are read")
            held.release()
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE, OLD)
        assert node.metrics.source.bytes == LARGE, "what came was not fetched again"
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == [], "a fill that met an error publishes nothing"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EPERM])
@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_error_in_opening_reaches_the_open(tmp_path: Path, code: int, size: int) -> None:
    make(tmp_path, size)
    async with run_node(tmp_path) as node:
        node.faults.fail("open", code, path=b"f")
        for _ in range(2):
            with raises_errno(code):
                await node.open(b"f")
        await node.assert_settled()
        node.faults.clear()
        expect_content(await node.read_file(b"f"), 0, 0, size, OLD)
        await node.assert_settled()


async def test_opening_that_fails_once_for_one_of_two(tmp_path: Path) -> None:
    """The error of the first opening must not be given to who opens after the source has recovered."""
    make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("open", path=b"f", error=errno.EACCES, times=1)
        handles: list[int] = []

        async def fail() -> None:
            with raises_errno(errno.EACCES):
                await node.open(b"f")
            handles.append(await node.open(b"f"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            await held.wait_entered()
            held.release()
        assert len(handles) == 1
        node.operations.release(handles[0])
        await node.assert_settled()


async def test_error_at_the_very_end_of_a_fill(tmp_path: Path) -> None:
    """Every piece is here; only the last look fails: readers do not notice, and nothing is published."""
    make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f")
        # One check when it was opened, one behind each of the four pieces; the next one is the last look.
        node.faults.fail("check", errno.EIO, skip=4)
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE, OLD)
        await until(lambda: node.metrics.fills.failed == 1, "the fill has failed")
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE, OLD)
        assert node.metrics.source.bytes == LARGE
        node.operations.release(handle)
        node.faults.clear()
        await node.assert_settled()
        assert node.copies() == []


@pytest.mark.slow
async def test_fifty_fills_that_fail_half_way(tmp_path: Path) -> None:
    """B11: no temporary file is left, no descriptor, no space."""
    for number in range(50):
        make(tmp_path, 10, f"f{number}")
        os.truncate(tmp_path / f"source/f{number}", MIDDLE)
    async with run_node(tmp_path) as node:
        fault = node.faults.fail("read", errno.EIO, skip=0)
        for number in range(50):
            fault.skip = 1
            handle = await node.open(b"f%d" % number)
            with raises_errno(errno.EIO):
                await node.read_all(handle, MIDDLE)
            node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == []
        await until(lambda: not open_descriptors(tmp_path / "source"), "the source's files are closed")


async def test_counts_are_exact_when_things_go_wrong(tmp_path: Path) -> None:
    path = make(tmp_path, LARGE)
    async with run_node(tmp_path, capacities=()) as node:
        node.faults.shorten(MiB)
        failing = node.faults.fail("read", errno.EIO, path=b"f", skip=2)
        handle = await node.open(b"f")
        with raises_errno(errno.EIO):
            await node.read(handle, 0, 4 * MiB)
        assert (node.metrics.source.reads, node.metrics.source.bytes) == (3, 2 * MiB)
        failing.times = 0
        held = node.faults.hold("read", path=b"f")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.read, handle, 0, 2 * MiB)
            await held.wait_entered()
            nursery.cancel_scope.cancel()
        held.release()
        await until(lambda: not node.source.data.waiting(), "the call has ended")
        assert node.metrics.source.bytes == 4 * MiB, "a reader that left does not take back what was read for it"
        os.truncate(path, PIECE_SIZE)
        with pytest.raises(StaleFile):
            await node.read(handle, PIECE_SIZE, 100)
        assert node.metrics.source.bytes == 4 * MiB
        assert (node.metrics.source.opens, node.metrics.source.stats) == (1, 1)
        node.operations.release(handle)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_no_more_threads(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread for a moment: an error for who asks then, and no place is lost for ever."""

    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    make(tmp_path, size)
    async with run_node(tmp_path, open_wait=0, capacities=(1 << 40,)) as node:
        handle = await node.open(b"f")
        with monkeypatch.context() as patch:
            patch.setattr("trio.lowlevel.start_thread_soon", refuse)
            for _ in range(40):
                with raises_errno(errno.EAGAIN):
                    await node.read(handle, size - 10, 10)
                with raises_errno(errno.EAGAIN):
                    await node.lookup(b"missing")
        expect_content(await node.read_all(handle, size), 0, 0, size, OLD)
        assert not (await node.lookup_in(1, b"missing")).node
        node.operations.release(handle)
        await node.assert_settled()


# ---- changes


def rewrite(path: Path) -> None:
    """Other bytes, as many."""
    write_file(path, 0, path.stat().st_size, NEW)


def rewrite_longer(path: Path) -> None:
    """Other bytes, more of them."""
    write_file(path, 0, path.stat().st_size + 14, NEW)


def truncate(path: Path) -> None:
    """Only the first half is left."""
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    """A log grows."""
    with path.open("ab") as file:
        file.write(content(0, path.stat().st_size, 5000, OLD))


def replace(path: Path) -> None:
    """Replaced by rename."""
    write_file(path.with_name("other"), 0, path.stat().st_size, NEW)
    path.with_name("other").rename(path)


def unlink(path: Path) -> None:
    """Gone."""
    path.unlink()


IN_PLACE = [rewrite, rewrite_longer, truncate, append]
BY_NAME = [replace, unlink]


@pytest.mark.parametrize("change", IN_PLACE + BY_NAME)
@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("tiers", [1, 0])
async def test_change_in_mid_fill(tmp_path: Path, change: Callable[[Path], None], size: int, tiers: int) -> None:
    """A12, promise 1: all old bytes, all new bytes, or ESTALE; the next open sees the new version."""
    path = make(tmp_path, size)
    async with run_node(tmp_path, capacities=(1 << 40,) * tiers, open_wait=0) as node:
        handle = await node.open(b"f")
        held = node.faults.hold("read", path=b"f", times=1)
        got: list[bytes | str] = []

        async def read_first() -> None:
            try:
                got.append(await node.read(handle, 0, 10_000))
            except StaleFile:
                got.append("stale")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_first)
            await held.wait_entered()
            change(path)
            held.release()
        old = content(0, 0, size, OLD)
        if change in BY_NAME:
            assert got == [old[:10_000]], "the file that is open keeps its bytes"
            assert await node.read_all(handle, size) == old
        else:
            assert got == ["stale"]
        for offset in range(0, size, MiB):
            try:
                data = await node.read(handle, offset, MiB)
            except StaleFile:
                assert change in IN_PLACE
                continue
            assert data == old[offset : offset + MiB]
        node.operations.release(handle)
        await node.assert_settled()
        assert node.copies() == []
        if change is unlink:
            with pytest.raises((FileNotFoundError, StaleFile)):
                await node.open(b"f")
            with pytest.raises(FileNotFoundError):
                await node.open(b"f")
        else:
            assert await node.read_file(b"f") == path.read_bytes()
            await node.assert_settled()
            assert len(node.copies()) == tiers


@pytest.mark.parametrize("change", IN_PLACE + BY_NAME)
@pytest.mark.parametrize("size", [SMALL, MIDDLE])
async def test_change_while_an_open_fetches(tmp_path: Path, change: Callable[[Path], None], size: int) -> None:
    """The open that fetches a small file says ESTALE, and the kernel's second try finds the new version."""
    path = make(tmp_path, size)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("read", path=b"f", times=1)
        got: list[bytes] = []

        async def read() -> None:
            got.append(await node.read_file(b"f"))

        old = path.read_bytes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await held.wait_entered()
            change(path)
            held.release()
        assert got == [old if change in BY_NAME else path.read_bytes()]
        await node.assert_settled()


@pytest.mark.parametrize("change", IN_PLACE + BY_NAME)
async def test_change_between_two_pieces(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """One reader wants two pieces; the change comes between them."""
    path = make(tmp_path, LARGE)
    async with run_node(tmp_path, pieces_in_flight=1) as node:
        handle = await node.open(b"f")
        held = node.faults.hold("read", path=b"f", times=1, skip=1)
        old = path.read_bytes()
        got: list[bytes | str] = []

        async def read() -> None:
            try:
                got.append(await node.read(handle, PIECE_SIZE - 100, 200))
            except StaleFile:
                got.append("stale")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await held.wait_entered()
            change(path)
            held.release()
        assert got == [old[PIECE_SIZE - 100 : PIECE_SIZE + 100] if change in BY_NAME else "stale"]
        node.operations.release(handle)
        await node.assert_settled()


@pytest.mark.parametrize("change", IN_PLACE + BY_NAME)
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_change_under_a_complete_copy(tmp_path: Path, change: Callable[[Path], None], size: int) -> None:
    """What is open goes on with its version; the new one is seen when the attributes have expired."""
    path = make(tmp_path, size)
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        await node.read_file(b"f")
        await node.wait_idle()
        handle = await node.open(b"f")
        old = path.read_bytes()
        change(path)
        assert await node.read_all(handle, size) == old
        node.clock.advance(61.0)
        assert await node.read_all(handle, size) == old
        if change is unlink:
            with pytest.raises(FileNotFoundError):
                await node.open(b"f")
        else:
            assert await node.read_file(b"f") == path.read_bytes()
        assert await node.read_all(handle, size) == old
        node.operations.release(handle)
        await node.assert_settled()


async def test_rewritten_again_and_again(tmp_path: Path) -> None:
    """A22: a metadata TTL of an hour, and each new open of an uncached file sees the new version all the same."""
    path = make(tmp_path, SMALL)
    async with run_node(tmp_path, metadata_ttl=3600.0, capacities=()) as node:
        for length in (SMALL, 5, LARGE, 14, 12):
            path.write_bytes(content(0, 0, length, length))
            handle = await node.open(b"f")
            expect_content(await node.read_all(handle, length), 0, 0, length, length)
            node.operations.release(handle)


async def test_read_that_finds_a_new_version_drops_the_metadata(tmp_path: Path) -> None:
    """As above, where the open still succeeded and the read is what notices."""
    path = make(tmp_path, SMALL)
    async with run_node(tmp_path, metadata_ttl=3600.0, capacities=()) as node:
        handle = await node.open(b"f")
        node.source.close(node.operations._files[handle].file.key)  # its descriptor fell out of the bounded set
        rewrite_longer(path)
        with pytest.raises(StaleFile):
            await node.read(handle, 0, 10)
        node.operations.release(handle)
        assert await node.read_file(b"f") == path.read_bytes()


async def cancel_and_unlink(node: Node, path: Path) -> None:
    """Cancel the open that fetches a file, which is then unlinked before it is read."""
    held = node.faults.hold("read", path=b"f", times=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.open, b"f")
        await held.wait_entered()
        nursery.cancel_scope.cancel()
    unlink(path)
    held.release()


@pytest.mark.parametrize("size", [SMALL, MIDDLE])
async def test_unlinked_after_its_reader_left(tmp_path: Path, size: int) -> None:
    """A fill that ends well for nobody must not stay with its space and its temporary file."""
    path = make(tmp_path, size)
    async with run_node(tmp_path) as node:
        await cancel_and_unlink(node, path)
        await node.assert_settled()
        await until(lambda: not open_descriptors(tmp_path), "everything is closed")


async def test_hard_link_added_in_mid_fill(tmp_path: Path) -> None:
    """Its ctime moves although its bytes do not: that is another version, but never wrong bytes."""
    path = make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        handle = await node.open(b"f")
        await node.read(handle, 0, 10)
        path.with_name("g").hardlink_to(path)
        with pytest.raises(StaleFile):
            await node.read(handle, PIECE_SIZE, 10)
        node.operations.release(handle)
        expect_content(await node.read_file(b"f"), 0, 0, LARGE, OLD)
        await node.assert_settled()


async def test_version_from_mtime_goes_on_over_a_chmod(tmp_path: Path) -> None:
    path = make(tmp_path, LARGE)
    async with run_node(tmp_path, version_from="mtime", metadata_ttl=60.0) as node:
        handle = await node.open(b"f")
        await node.read(handle, 0, 10)
        path.chmod(0o600)
        expect_content(await node.read_all(handle, LARGE), 0, 0, LARGE, OLD)
        node.operations.release(handle)
        await node.assert_settled()
        node.clock.advance(61.0)
        expect_content(await node.read_file(b"f"), 0, 0, LARGE, OLD)
        assert node.metrics.source.bytes == LARGE
