"""Names and attributes: asked once, believed for their time, and served on while the source is away."""

import errno
import os
from pathlib import Path

import pytest
import trio

from dmfs.errors import StaleFile
from dmfs.types import Entry, unpack_attributes
from tests.operations.harness import Fault, Node, raises_errno, run_node, until
from tests.support.files import write_file

AWAY = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN]
ANSWERS = [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source with a file, a link, a directory with a file in it."""
    folder = tmp_path / "source"
    (folder / "d").mkdir(parents=True)
    write_file(folder / "f", 0, 1000)
    write_file(folder / "d/g", 1, 2000)
    (folder / "l").symlink_to("d/nowhere")
    return folder


def assert_same(entry: Entry, path: Path) -> None:
    """Every attribute is the source's."""
    seen, st = unpack_attributes(entry.attributes), path.lstat()
    for name in ("ino", "size", "blocks", "mtime_ns", "ctime_ns", "mode", "nlink", "uid", "gid", "rdev", "blksize"):
        assert getattr(seen, name) == getattr(st, f"st_{name}"), name


# ---- asking


async def test_attributes_are_the_sources(tmp_path: Path, folder: Path) -> None:
    os.utime(folder / "f", ns=(-1, -1_500_000_000))
    async with run_node(tmp_path) as node:
        for name in ("f", "d", "d/g", "l"):
            assert_same(await node.lookup(os.fsencode(name)), folder / name)
        assert await node.operations.readlink((await node.lookup(b"l")).node) == b"d/nowhere"
        with raises_errno(errno.ENOTDIR):
            await node.lookup(b"f/x")
        with raises_errno(errno.ENOTDIR):
            node.operations.opendir((await node.lookup(b"f")).node)
        for name, code in ((b"d", errno.EISDIR), (b"l", errno.EINVAL)):
            with raises_errno(code):
                await node.open(name)


async def test_simultaneous_look_ups_ask_once(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        held = node.faults.hold("stat")
        entries: list[Entry] = []

        async def look(name: bytes) -> None:
            entries.append(await node.lookup_in(1, name))

        async with trio.open_nursery() as nursery:
            for name in [b"f", b"missing"] * 16:
                nursery.start_soon(look, name)
            await held.wait_entered()
            node.faults.clear()
        assert node.metrics.source.stats == 2
        assert len({entry.node for entry in entries if entry.node}) == 1
        assert sum(entry.node == 0 for entry in entries) == 16
        (known,) = {entry.node for entry in entries if entry.node}
        node.operations.forget(known, 15)
        assert node.operations.statistics()["inodes"] == 2
        node.operations.forget(known, 1)
        assert node.operations.statistics()["inodes"] == 1


@pytest.mark.parametrize("ask", ["lookup", "getattr"])
async def test_error_is_for_all_who_wait(tmp_path: Path, folder: Path, ask: str) -> None:
    """A source that needs half a minute to fail must not make sixteen callers wait one after the other."""
    async with run_node(tmp_path) as node:
        known = (await node.lookup(b"f")).node
        node.clock.advance(3600.0)
        held = node.faults.hold("stat", error=errno.EACCES)
        failed: list[int] = []

        async def fail() -> None:
            with raises_errno(errno.EACCES):
                await (node.lookup_in(1, b"f") if ask == "lookup" else node.getattr(known))
            failed.append(1)

        before = node.faults.counts["stat"]
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(fail)
            await held.wait_entered()
            held.release()
        assert len(failed) == 16
        assert node.faults.counts["stat"] == before + 1


async def test_cancelled_asker_lets_the_next_one_ask(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        held = node.faults.hold("stat", times=1)
        found: list[Entry] = []

        async def look() -> None:
            found.append(await node.lookup_in(1, b"f"))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as first:
                    first.start_soon(node.lookup_in, 1, b"f")
                    await held.wait_entered()
                    nursery.start_soon(look)
                    await until(lambda: node.operations._questions, "it is being asked")
                    scope.cancel()
        held.release()
        assert len(found) == 1
        node.operations.forget(found[0].node, 1)
        assert node.operations.statistics()["inodes"] == 1


async def test_simultaneous_getattrs_ask_once(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        known = (await node.lookup(b"f")).node
        node.clock.advance(61.0)
        held = node.faults.hold("stat", path=b"f")
        before = node.faults.counts["stat"]
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(node.getattr, known)
                nursery.start_soon(node.lookup_in, 1, b"f")
            await held.wait_entered()
            held.release()
        assert node.faults.counts["stat"] == before + 1


# ---- for how long


async def test_time_to_live(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=100.0) as node:
        entry = await node.lookup(b"f")
        assert entry.ttl == 100.0
        node.clock.advance(99.0)
        assert (await node.lookup(b"f")).ttl == pytest.approx(1.0)
        assert node.metrics.source.stats == 1
        node.clock.advance(1.5)
        assert (await node.lookup(b"f")).ttl == 100.0
        assert node.metrics.source.stats == 2


async def test_change_is_seen_after_the_ttl(tmp_path: Path, folder: Path) -> None:
    """Promise 7; a new version is a new node, and the old one keeps its own attributes."""
    async with run_node(tmp_path) as node:
        old = await node.lookup(b"f")
        write_file(folder / "f", 0, 500, 1)
        assert (await node.lookup(b"f")).node == old.node
        node.clock.advance(3600.0)
        new = await node.lookup(b"f")
        assert new.node != old.node
        assert_same(new, folder / "f")
        assert (await node.getattr(old.node)).size == 1000
        node.clock.advance(1e6)
        assert (await node.getattr(old.node)).size == 1000
        for entry in (old, new):
            node.operations.forget(entry.node, 9)
        assert node.operations.statistics()["inodes"] == 1


async def test_getattr_finds_a_new_version(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        old = await node.lookup(b"f")
        write_file(folder / "f", 0, 500, 1)
        node.clock.advance(61.0)
        assert (await node.getattr(old.node)).size == 1000
        assert (await node.stat(b"f")).size == 500


async def test_getattr_of_a_file_that_is_gone(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        old, directory = await node.lookup(b"f"), await node.lookup(b"d")
        (folder / "f").unlink()
        (folder / "d/g").unlink()
        (folder / "d").rmdir()
        node.clock.advance(61.0)
        assert (await node.getattr(old.node)).size == 1000, "whoever has it open goes on"
        assert (await node.getattr(directory.node)).is_directory
        with pytest.raises(FileNotFoundError):
            await node.lookup(b"f")
        with pytest.raises(FileNotFoundError):
            await node.lookup(b"d/g")


async def test_missing_name(tmp_path: Path, folder: Path) -> None:
    """C20: believed for a while, at most as long as the folder's listing, then asked again."""
    async with run_node(tmp_path) as node:
        entry = await node.lookup_in(1, b"new")
        assert (entry.node, entry.ttl) == (0, 60.0)
        write_file(folder / "new", 2, 10)
        assert (await node.lookup_in(1, b"new")).node == 0
        assert node.metrics.source.stats == 1
        node.clock.advance(60.0)
        assert (await node.lookup_in(1, b"new")).node
    async with run_node(tmp_path, metadata_ttl=0.0) as node:
        assert (await node.lookup_in(1, b"newer")).node == 0
        write_file(folder / "newer", 2, 10)
        assert (await node.lookup_in(1, b"newer")).node


async def test_very_many_missing_names(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmfs.fuse.operations.MAX_NEGATIVES", 100)
    async with run_node(tmp_path) as node:
        for number in range(250):
            assert not (await node.lookup_in(1, b"missing%d" % number)).node
            assert len(node.operations._inodes.root.negatives) <= 100


async def test_ttl_of_zero_asks_each_time(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=0.0) as node:
        for number in range(3):
            write_file(folder / "f", 0, 100 + number)
            assert (await node.stat(b"f")).size == 100 + number
        assert node.metrics.source.stats == 3


@pytest.mark.parametrize("kinds", ["file dir", "dir file", "link dir", "file link"])
async def test_name_changes_its_kind(tmp_path: Path, folder: Path, kinds: str) -> None:
    """C18: another kind is another node, and children of what is a directory now can be opened."""

    def make(kind: str) -> None:
        path = folder / "x"
        if path.is_dir() and not path.is_symlink():
            (path / "child").unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if kind == "dir":
            path.mkdir()
            write_file(path / "child", 5, 50)
        elif kind == "link":
            path.symlink_to("f")
        else:
            write_file(path, 6, 60)

    first, second = kinds.split()
    make(first)
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        old = await node.lookup(b"x")
        if first == "dir":
            await node.read_file(b"x/child")
        make(second)
        node.clock.advance(61.0)
        new = await node.lookup(b"x")
        assert new.node != old.node
        assert_same(new, folder / "x")
        if second == "dir":
            assert len(await node.read_file(b"x/child")) == 50
        elif first == "dir":
            with pytest.raises((StaleFile, OSError)):
                await node.lookup_in(old.node, b"another")


async def test_hard_links(tmp_path: Path, folder: Path) -> None:
    """C01: one node, one link count, whichever name is asked first; a removed name does not harm the other."""
    (folder / "d/h").hardlink_to(folder / "f")
    async with run_node(tmp_path, metadata_ttl=60.0, version_from="mtime") as node:
        first, second = await node.lookup(b"f"), await node.lookup(b"d/h")
        assert first.node == second.node
        assert unpack_attributes(first.attributes).nlink == 2
        (folder / "d/h").unlink()
        node.clock.advance(61.0)
        with pytest.raises(FileNotFoundError):
            await node.lookup(b"d/h")
        before = node.metrics.source.stats
        assert (await node.lookup(b"f")).node == first.node
        assert (await node.lookup(b"f")).node == first.node
        assert (await node.getattr(first.node)).nlink == 1
        assert node.metrics.source.stats == before + 1, "known by its other name, and remembered"


async def test_getattr_of_a_hard_link_whose_name_is_gone(tmp_path: Path, folder: Path) -> None:
    (folder / "d/h").hardlink_to(folder / "f")
    async with run_node(tmp_path, metadata_ttl=60.0, version_from="mtime") as node:
        await node.lookup(b"f")
        known = (await node.lookup(b"d/h")).node
        (folder / "d/h").unlink()
        node.clock.advance(61.0)
        await node.getattr(known)
        assert (await node.getattr(known)).nlink == 1
        assert (await node.lookup(b"f")).node == known


# ---- the source is away


@pytest.mark.parametrize("code", AWAY)
async def test_what_is_known_is_served_while_the_source_is_away(tmp_path: Path, folder: Path, code: int) -> None:
    """A14, promise 2: attributes, listing and bytes; never ENOENT, never empty."""
    async with run_node(tmp_path) as node:
        data = await node.read_file(b"d/g")
        listing = await node.listing()
        node.clock.advance(1e5)
        for call in ("stat", "opendir", "open", "read", "check"):
            node.faults.fail(call, code)
        for _ in range(2):
            assert (await node.stat(b"d/g")).size == 2000
            assert (await node.getattr((await node.lookup(b"d")).node)).is_directory
            assert await node.listing() == listing
            assert await node.read_file(b"d/g") == data
            with raises_errno(code):
                await node.lookup(b"f")
            with raises_errno(code):
                await node.lookup(b"missing")
            node.clock.advance(10.0)
        assert node.metrics.stale_served >= 6
        node.faults.clear()
        write_file(folder / "d/g", 1, 100)
        assert (await node.stat(b"d/g")).size == 100, "believed for no longer than a moment"


@pytest.mark.parametrize("code", ANSWERS)
async def test_other_errors_are_believed(tmp_path: Path, folder: Path, code: int) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        known = (await node.lookup(b"f")).node
        node.clock.advance(61.0)
        node.faults.fail("stat", code)
        with raises_errno(code):
            await node.lookup(b"f")
        with raises_errno(code):
            await node.getattr(known)
        assert node.metrics.stale_served == 0
        node.faults.clear()
        assert (await node.lookup(b"f")).node == known, "a failed look-up is not a deletion"


async def test_only_the_source_says_that_a_name_is_gone(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        await node.lookup(b"f")
        node.clock.advance(61.0)
        node.faults.fail("stat", errno.ENOENT)
        assert (await node.lookup_in(1, b"f")).node == 0
        node.faults.clear()
        assert (await node.lookup_in(1, b"f")).node == 0, "believed for a while"
        node.clock.advance(60.0)
        assert (await node.lookup_in(1, b"f")).node


# ---- forgetting


async def test_references(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        for _ in range(3):
            await node.lookup(b"d/g")
        directory, file = (await node.lookup(b"d")).node, (await node.lookup(b"d/g")).node
        assert node.operations.statistics()["inodes"] == 3
        node.operations.forget(file, 4)
        assert node.operations.statistics()["inodes"] == 2
        node.operations.forget(directory, 5)
        assert node.operations.statistics()["inodes"] == 1
        node.operations.forget(directory, 1)
        assert node.metrics.source.stats == 2
        assert (await node.lookup(b"d/g")).node not in (directory, file)


# ---- statfs


async def test_statfs(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        numbers = await node.operations.statfs()
        wanted = os.statvfs(folder)
        assert (numbers.f_blocks, numbers.f_namemax) == (wanted.f_blocks, wanted.f_namemax)
        assert node.operations.statfs_nowait() is not None
        node.clock.advance(5.0)
        assert node.operations.statfs_nowait() is None


async def df(node: Node, answers: list[object]) -> None:
    """One df."""
    try:
        answers.append(await node.operations.statfs())
    except OSError as exc:
        answers.append(exc.errno)


async def hang_and_ask(node: Node, answers: list[object]) -> Fault:
    """Twenty df while the source hangs."""
    held = node.faults.hold("statvfs")
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(df, node, answers)
    return held


async def test_statfs_of_a_source_that_hangs(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: never a hang, the last numbers known, and not a thread for each that asks."""
    monkeypatch.setattr("dmfs.fuse.operations.STATVFS_WAIT", 0.02)
    async with run_node(tmp_path) as node:
        answers: list[object] = []
        held = await hang_and_ask(node, answers)
        assert answers == [errno.ETIMEDOUT] * 20
        assert node.faults.counts["statvfs"] == 1
        held.release()
        await until(lambda: node.operations._statvfs_question is None, "the source has answered")
        node.faults.clear()
        known = await node.operations.statfs()
        node.clock.advance(5.0)
        answers.clear()
        await hang_and_ask(node, answers)
        assert answers == [known] * 20
        assert node.faults.counts["statvfs"] == 2 + 1
        assert node.operations.statfs_nowait() == known
        assert (await node.lookup(b"f")).node, "and it takes nothing from others"


async def test_statfs_of_a_source_that_fails(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        node.faults.fail("statvfs", errno.EIO)
        with raises_errno(errno.EIO):
            await node.operations.statfs()
        node.faults.clear()
        known = await node.operations.statfs()
        node.clock.advance(5.0)
        node.faults.fail("statvfs", errno.EIO)
        assert await node.operations.statfs() == known
