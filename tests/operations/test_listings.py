"""Listings: one reading of the source for all who list, streamed, without a stat an entry, and served on when away."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from dmfs.fuse.inodes import ROOT
from dmfs.tiers import source as source_module
from dmfs.types import DirEntry
from tests.operations.harness import LIMIT, Node, in_thread, raises_errno, run_node, until

COUNT = 600
BATCH = 200  # entries handed over at once; of COUNT, as 1,024 of 3,000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with many empty files, and one of each other kind."""
    monkeypatch.setattr(source_module, "LISTING_BATCH", BATCH)
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"file{number:05d}").touch()
    (folder / "directory").mkdir()
    (folder / "link").symlink_to("nowhere")
    (folder / "\udcff\n\u00e9").touch()
    return folder


class Gate:
    """Stops the reading of a directory before its entry number `at`, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.at = at
        self.seen = 0
        self.error: OSError | None = None
        self.reached = threading.Event()
        self.opened = threading.Event()
        kind_of = source_module._entry_type

        def entry_type(entry: object) -> int:
            self.seen += 1
            if self.seen == self.at:
                self.reached.set()
                assert self.opened.wait(LIMIT)
                if self.error is not None:
                    raise self.error
            return kind_of(entry)  # type: ignore[arg-type]

        monkeypatch.setattr(source_module, "_entry_type", entry_type)

    async def wait_reached(self) -> None:
        await in_thread(self.reached.wait, "the entry")


def names_of(entries: list[DirEntry]) -> list[bytes]:
    """The names, without those every directory has."""
    assert [entry.name for entry in entries[:2]] == [b".", b".."]
    return [entry.name for entry in entries[2:]]


def wanted(folder: Path) -> list[bytes]:
    """The names a listing must have, sorted."""
    return sorted(bytes(path.name, "utf-8", "surrogateescape") for path in folder.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3, 100, 5000])
async def test_whole_listing(tmp_path: Path, folder: Path, count: int) -> None:
    """C03, C06, C07: each name once, the number and kind of the source, one reading and no stat."""
    async with run_node(tmp_path) as node:
        entries = await node.listing(count=count)
        assert sorted(names_of(entries)) == wanted(folder)
        assert (node.metrics.source.listings, node.metrics.source.stats) == (1, 0)
        for entry in [entry for entry in entries if not entry.name.startswith(b"file")] + entries[5:10]:
            st = (folder / entry.name.decode("utf-8", "surrogateescape")).lstat()
            if entry.name != b"..":
                assert (entry.ino, entry.type) == (st.st_ino, stat.S_IFMT(st.st_mode) >> 12)
        assert await node.listing() == entries
        assert node.metrics.source.listings == 1


async def test_parents_number(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        entries = await node.listing((await node.lookup(b"directory")).node)
        assert names_of(entries) == []
        numbers = [os.stat(path).st_ino for path in (folder / "directory", folder)]
        assert [entry.ino for entry in entries] == numbers


async def test_listing_streams(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first names are there while the source is still being read."""
    gate = Gate(monkeypatch, 500)
    async with run_node(tmp_path) as node:
        handle = node.operations.opendir(ROOT)
        entries = await node.readdir(handle, 0, 100)
        while len(entries) < 2 * BATCH:
            entries += await node.readdir(handle, len(entries), 100)
        assert node.operations.readdir_nowait(handle, 2 * BATCH + 2, 100) is None
        assert not gate.opened.is_set()
        gate.opened.set()
        while chunk := await node.readdir(handle, len(entries), 500):
            entries += chunk
        assert sorted(names_of(entries)) == wanted(folder)
        node.operations.releasedir(handle)


async def test_simultaneous_listers_cost_one_reading(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 300)
    async with run_node(tmp_path) as node:
        listings: list[list[DirEntry]] = []

        async def list_all(count: int) -> None:
            listings.append(await node.listing(count=count))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(list_all, 50 + 100 * number)
            await gate.wait_reached()
            gate.opened.set()
        assert len(listings) == 8
        for listing in listings:
            assert listing == listings[0]
        assert node.metrics.source.listings == 1


async def test_cancelled_lister_does_not_stop_the_others(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 10)
    async with run_node(tmp_path) as node:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.listing)
                await gate.wait_reached()
                scope.cancel()
        gate.opened.set()
        assert sorted(names_of(await node.listing())) == wanted(folder)
        assert node.metrics.source.listings == 1


@pytest.mark.parametrize("at", [1, 500])
async def test_error_in_mid_listing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Names that came are given, then the source's own error; the next listing begins anew."""
    gate = Gate(monkeypatch, at)
    gate.error = OSError(errno.EIO, "no")
    gate.opened.set()
    async with run_node(tmp_path) as node:
        handle = node.operations.opendir(ROOT)
        entries: list[DirEntry] = []
        with raises_errno(errno.EIO):
            while chunk := await node.readdir(handle, len(entries), 100):
                entries += chunk
        assert len(entries) == (2 + 2 * BATCH if at == 500 else 0)
        if entries:
            with raises_errno(errno.EIO):
                await node.readdir(handle, len(entries), 100)
        gate.at = 0
        assert len(await node.readdir(handle, 0, 100)) == 102, "rewinding begins anew"
        node.operations.releasedir(handle)
        assert sorted(names_of(await node.listing())) == wanted(folder)
        assert node.metrics.source.listings == 2


async def test_error_does_not_lose_what_was_known(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source goes away in mid-listing: that listing fails, but the old one is served to the next lister."""
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        known = await node.listing()
        node.clock.advance(61.0)
        gate = Gate(monkeypatch, 500)
        gate.error = OSError(errno.EIO, "no")
        gate.opened.set()
        with raises_errno(errno.EIO):
            await node.listing()
        node.faults.fail("opendir", errno.EIO)
        assert await node.listing() == known
        assert node.metrics.stale_served == 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT])
async def test_answer_of_the_source_is_believed(tmp_path: Path, folder: Path, code: int) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        await node.listing()
        node.clock.advance(61.0)
        node.faults.fail("opendir", code)
        with raises_errno(code):
            await node.listing()


async def test_surprise_does_not_end_the_node(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expected in the background is logged, counted and answered EIO."""
    async with run_node(tmp_path) as node:
        with monkeypatch.context() as patch:
            patch.setattr(source_module, "_entry_type", None)
            with raises_errno(errno.EIO):
                await node.listing()
        assert node.metrics.surprises == 1
        assert "listing" in str(node.errors.entries()[0]["message"])
        assert sorted(names_of(await node.listing())) == wanted(folder)
        node.metrics.surprises = 0


async def test_change_is_seen_after_the_ttl(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_ttl=60.0) as node:
        before = await node.listing()
        (folder / "new").touch()
        (folder / "link").unlink()
        assert await node.listing() == before
        node.clock.advance(61.0)
        assert sorted(names_of(await node.listing())) == wanted(folder)
        assert node.metrics.source.listings == 2


async def test_open_listing_stays_what_it_was(tmp_path: Path, folder: Path) -> None:
    """A change in mid-listing loses no name that was there all the time, and shows none twice."""
    async with run_node(tmp_path, metadata_ttl=0.0) as node:
        handle = node.operations.opendir(ROOT)
        entries = await node.readdir(handle, 0, 500)
        (folder / "aaa").touch()
        (folder / "file00000").unlink()
        await node.listing()
        while chunk := await node.readdir(handle, len(entries), 500):
            entries += chunk
        names = names_of(entries)
        assert len(names) == len(set(names))
        assert set(names) >= set(wanted(folder)) - {b"aaa"}
        node.operations.releasedir(handle)


# ---- attributes in advance


async def fetched(node: Node) -> None:
    """Wait until all attributes that were advised are fetched."""
    await trio.testing.wait_all_tasks_blocked()
    await until(lambda: not node.operations._questions, "the attributes are fetched")


async def walk_with_attributes(node: Node, handle: int) -> int:
    """List as READDIRPLUS does; how many entries had their attributes."""
    known = index = 0
    while chunk := await node.readdir(handle, index, 50):
        if index:
            node.operations.advise_attributes(handle, index)
        await fetched(node)
        for entry in chunk:
            found = node.operations.known_entry(handle, entry.name)
            if found is not None:
                known += 1
                node.operations.forget(found.node, 1)
        index += len(chunk)
    return known


async def test_attributes_in_advance(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        handle = node.operations.opendir(ROOT)
        known = await walk_with_attributes(node, handle)
        node.operations.releasedir(handle)
        assert known >= COUNT - 100, "all but the first ones"
        assert known <= node.metrics.source.stats <= COUNT + 3, "never one of them twice"
        before = node.metrics.source.stats
        for number in range(100, 200):
            assert (await node.lookup(b"file%05d" % number)).node
        assert node.metrics.source.stats - before <= 100


async def test_unreferenced_nodes_are_bounded(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmfs.fuse.inodes.MAX_UNREFERENCED", 300)
    async with run_node(tmp_path) as node:
        kept = await node.lookup(b"link")
        handle = node.operations.opendir(ROOT)
        node.operations.readdir_nowait(handle, 0, 1)
        await node.readdir(handle, 0, 5000)
        for index in range(2, COUNT, 128):
            node.operations.advise_attributes(handle, index)
            await fetched(node)
            assert node.operations.statistics()["inodes"] <= 300 + 2
        node.operations.releasedir(handle)
        assert (await node.getattr(kept.node)).size == len("nowhere")


async def test_look_up_waits_for_what_is_fetched_in_advance(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path, metadata_threads=32) as node:
        await node.listing()
        handle = node.operations.opendir(ROOT)
        names = [entry.name for entry in await node.readdir(handle, 0, 1000)][2:]
        held = node.faults.hold("stat")
        node.operations.advise_attributes(handle, 2)
        async with trio.open_nursery() as nursery:
            await held.wait_entered()
            for name in names[:16]:
                nursery.start_soon(node.lookup_in, ROOT, name)
            held.release()
        await fetched(node)
        assert node.metrics.source.stats == 256
        node.operations.releasedir(handle)


async def test_error_in_advance_is_nobodys(tmp_path: Path, folder: Path) -> None:
    async with run_node(tmp_path) as node:
        await node.listing()
        handle = node.operations.opendir(ROOT)
        names = [entry.name for entry in await node.readdir(handle, 0, 1000)][2:]
        node.faults.fail("stat", errno.EIO)
        node.operations.advise_attributes(handle, 2)
        await fetched(node)
        assert node.faults.counts["stat"] == 256
        assert node.operations.known_entry(handle, names[0]) is None
        node.faults.clear()
        assert (await node.lookup_in(ROOT, names[0])).node
        node.operations.releasedir(handle)
