"""The table of inodes by itself: which node a name leads to, and when a node goes."""

import errno
import os
import stat
from dataclasses import dataclass, replace

import pytest

from dmfs.errors import without_traceback
from dmfs.fuse.inodes import ROOT, Directory, InodeTable, Listing
from dmfs.types import Attributes, DirEntry, VersionFrom, pack_attributes


@dataclass(frozen=True)
class Like:
    """What a stat says of a file."""

    ino: int = 10
    size: int = 100
    mtime: int = 5
    ctime: int = 6
    mode: int = stat.S_IFREG | 0o644
    nlink: int = 1

    def pack(self) -> Attributes:
        """As attributes."""
        values = [self.mode, self.ino, 1, self.nlink, 0, 0, self.size, 0, self.mtime, self.ctime]
        times = [None, None, None, 0, self.mtime * 10**9, self.ctime * 10**9, 4096, 8, 0]
        return pack_attributes(os.stat_result([*values, *times]))


FILE = Like()
DIRECTORY = Like(ino=2, mode=stat.S_IFDIR | 0o755, nlink=2)


def make_table(version_from: VersionFrom = "ctime") -> InodeTable:
    """A table of the root alone."""
    return InodeTable(replace(DIRECTORY, ino=1).pack(), version_from=version_from)


def add_directory(table: InodeTable, name: bytes, ino: int = 2) -> Directory:
    """A directory in the root."""
    node = table.update(table.root, name, replace(DIRECTORY, ino=ino).pack())
    assert isinstance(node, Directory)
    return node


def test_same_version_is_the_same_node() -> None:
    table = make_table()
    node = table.update(table.root, b"f", FILE.pack())
    assert table.update(table.root, b"f", FILE.pack()) is node
    assert node.path() == b"f"
    assert (node.id, table.root.id) == (2, ROOT)
    assert len(table) == 2


@pytest.mark.parametrize(
    "new",
    [
        replace(FILE, size=101),
        replace(FILE, mtime=6),
        replace(FILE, ctime=7),
        replace(FILE, ino=11),
        replace(FILE, mode=stat.S_IFLNK | 0o777),
        replace(DIRECTORY, ino=10),
    ],
)
def test_new_version_is_a_new_node(new: Like) -> None:
    table = make_table()
    old = table.update(table.root, b"f", FILE.pack())
    table.refer(old)
    node = table.update(table.root, b"f", new.pack())
    assert node.id != old.id
    assert old.is_superseded
    assert not node.is_superseded
    assert table.get(old.id) is old, "the kernel still refers to it"
    assert table.root.children == {b"f": node}
    table.forget(old.id, 1)
    assert table.root.children == {b"f": node}, "forgetting the old one leaves the new one"
    with pytest.raises(KeyError):
        table.get(old.id)


def test_version_from_mtime_ignores_ctime() -> None:
    table = make_table("mtime")
    node = table.update(table.root, b"f", FILE.pack())
    assert table.update(table.root, b"f", replace(FILE, ctime=9, mode=stat.S_IFREG | 0o600).pack()) is node
    assert table.update(table.root, b"f", replace(FILE, mtime=9).pack()) is not node


def test_directory_keeps_its_node() -> None:
    table = make_table()
    node = add_directory(table, b"d")
    assert table.update(table.root, b"d", replace(DIRECTORY, mtime=9, ctime=9, size=8192, nlink=5).pack()) is node
    assert table.update(table.root, b"d", replace(DIRECTORY, ino=77).pack()) is not node


def test_node_ids_are_never_used_again() -> None:
    table = make_table()
    seen = set()
    for size in range(100):
        node = table.update(table.root, b"f", replace(FILE, size=size).pack())
        table.refer(node)
        assert node.id not in seen
        seen.add(node.id)
        table.forget(node.id, 1)
    assert len(table) == 1


def test_forgetting_to_zero() -> None:
    table = make_table()
    directory = add_directory(table, b"d")
    node = table.update(directory, b"f", FILE.pack())
    for _ in range(3):
        table.refer(node)
    table.refer(directory)
    table.forget(node.id, 2)
    assert table.get(node.id) is node
    table.forget(node.id, 1)
    assert directory.children == {}
    table.forget(node.id, 1)
    table.forget(12345, 1)
    table.forget(directory.id, 1)
    table.forget(ROOT, 100)
    assert len(table) == 1
    assert table.get(ROOT) is table.root


def test_parent_forgotten_before_its_children() -> None:
    table = make_table()
    directory = add_directory(table, b"d")
    node, other = (table.update(directory, name, replace(FILE, ino=ino).pack()) for ino, name in ((5, b"f"), (6, b"g")))
    table.refer(directory)
    table.refer(node)
    table.forget(directory.id, 1)
    assert node.path() == b"d/f"
    with pytest.raises(KeyError):
        table.get(other.id)
    table.forget(node.id, 1)
    assert len(table) == 1


def test_removed_name_that_nobody_refers_to() -> None:
    table = make_table()
    node = table.update(table.root, b"f", FILE.pack())
    table.remove(table.root, b"f")
    table.remove(table.root, b"never")
    assert node.is_superseded
    assert len(table) == 1


def test_known_name_is_not_missing_any_more() -> None:
    table = make_table()
    table.root.negatives[b"f"] = 100.0
    table.update(table.root, b"f", FILE.pack())
    assert table.root.negatives == {}


def test_find() -> None:
    table = make_table()
    directory = add_directory(table, b"d")
    node = table.update(directory, b"f", FILE.pack())
    assert table.find(b"d/f") is node
    assert table.find(b"") is table.root
    assert table.find(b"d/f/x") is None
    assert table.find(b"d/g") is None


# ---- hard links

LINKED = replace(FILE, nlink=2)


def test_names_of_a_hard_linked_file_share_a_node() -> None:
    table = make_table()
    directory = add_directory(table, b"d")
    node = table.update(table.root, b"a", LINKED.pack())
    assert table.update(directory, b"b", LINKED.pack()) is node
    assert table.update(table.root, b"c", replace(LINKED, ino=11).pack()) is not node
    table.refer(node)
    table.forget(node.id, 1)
    assert directory.children == {}
    assert set(table.root.children) == {b"d", b"c"}


@pytest.mark.parametrize("removed", [b"a", b"b"])
def test_hard_linked_file_outlives_one_of_its_names(removed: bytes) -> None:
    table = make_table()
    node = table.update(table.root, b"a", LINKED.pack())
    table.update(table.root, b"b", LINKED.pack())
    table.refer(node)
    table.remove(table.root, removed)
    left = b"b" if removed == b"a" else b"a"
    assert not node.is_superseded
    assert node.path() == left, "it is asked for by the name that is left"
    table.remove(table.root, left)
    assert node.is_superseded


def test_rewritten_hard_linked_file_is_a_new_node_by_each_name() -> None:
    table = make_table()
    old = table.update(table.root, b"a", LINKED.pack())
    table.update(table.root, b"b", LINKED.pack())
    table.refer(old)
    changed = replace(LINKED, size=101)
    new = table.update(table.root, b"a", changed.pack())
    assert new is not old
    assert old.is_superseded
    assert table.update(table.root, b"b", changed.pack()) is new
    table.forget(old.id, 1)
    assert table.root.children == {b"a": new, b"b": new}
    assert len(table) == 2


# ---- bounds


def test_nodes_known_in_advance_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmfs.fuse.inodes.MAX_UNREFERENCED", 10)
    table = make_table()
    kept = table.update(table.root, b"kept", replace(FILE, ino=9999).pack())
    table.refer(kept)
    for number in range(100):
        table.update(table.root, b"f%d" % number, replace(FILE, ino=number + 100).pack())
        assert len(table) <= 12
    assert set(table.root.children) == {b"kept", *(b"f%d" % number for number in range(90, 100))}


def test_listing() -> None:
    listing = Listing()
    grown = listing.grown
    listing.extend([DirEntry(b"a", 1, 8), DirEntry(b"b", 2**64 - 1, 4)])
    assert grown.is_set()
    assert not listing.grown.is_set()
    assert (len(listing), listing.is_over) == (2, False)
    assert listing.entries(1, 100) == [DirEntry(b"b", 2**64 - 1, 4)]
    assert listing.entries(2, 100) == listing.entries(100, 200) == []
    assert listing.names(0, 1) == [b"a"]
    listing.finish(None)
    assert (listing.is_complete, listing.is_over) == (True, True)
    failed = Listing()
    failed.finish(without_traceback(OSError(errno.EIO, "no")))
    assert (failed.is_complete, failed.is_over) == (False, True)
