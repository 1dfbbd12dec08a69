"""A fake of `dmfs.fuse.operations.Operations`: a small tree in memory, told to fail or to wait at will.

For the tests of front ends, which must cope with whatever the real one does. It also keeps account: every reference
counted and taken back, every handle opened and released, and what a front end did that it must not (`misuse`).
Runs in one trio task tree, like the real one; no I/O.
"""

import errno
import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import trio

from dmfs.log import ErrorLog
from dmfs.metrics import Metrics
from dmfs.types import Attributes, DirEntry, Entry, pack_attributes, unpack_attributes

ROOT = 1
FIRST_INO = 1000  # far from the node ids, so that a front end which mixes the two is found out


@dataclass
class FakeNode:
    """One version of a file, a directory or a symlink. `content` is a file's bytes or a link's target."""

    attributes: Attributes
    name: bytes
    content: bytes = b""
    children: dict[bytes, int] = field(default_factory=dict)
    parent: int = ROOT


@dataclass
class Rule:
    """What a method does instead of its work: raise `exc`; wait until the fake's `let_go`; else nothing unusual.

    `subject` limits it to calls about that name.
    """

    exc: BaseException | None = None
    is_waiting: bool = False
    subject: bytes | None = None


class FakeOperations:
    """The tree, the rules, and the account.

    Attributes:
        ttl: seconds given with every answer; 0 makes the kernel ask every time.
        rules: by method name, as in the interface (`lookup_nowait`, `lookup`, ...).
        declining: names of `*_nowait` methods that answer None.
        references: node -> references that the kernel has; empty when all have been taken back.
        handles, directory_handles: open ones -> node.
        held: (method, name) of the calls that wait right now.
        cancelled: the same of waiting calls that were cancelled, as an interrupt does.
        misuse: sentences about calls that the interface does not allow.
    """

    def __init__(self) -> None:
        self.errors = ErrorLog()
        self.metrics = Metrics()
        self.ttl = 0.0
        self.rules: dict[str, Rule] = {}
        self.declining: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.references: Counter[int] = Counter()
        self.handles: dict[int, int] = {}
        self.directory_handles: dict[int, int] = {}
        self.held: list[tuple[str, bytes]] = []
        self.cancelled: list[tuple[str, bytes]] = []
        self.misuse: list[str] = []
        self.keeps_superseded = False
        self.manager = SimpleNamespace(drops_served_pages=False)
        self._let_go = trio.Event()
        self._numbers = itertools.count(FIRST_INO)
        self._node_ids = itertools.count(ROOT + 1)
        self._handle_ids = itertools.count(1)
        self.nodes = {ROOT: FakeNode(self._attributes(stat.S_IFDIR | 0o755, next(self._numbers), 4096), b"/")}

    # The tree, for tests to build and change

    def add_file(self, path: bytes, content: bytes, *, ino: int = 0, **fields: int) -> int:
        """A file, or a new version of it: a new node id, and the inode number kept. `fields` are `st_*` of stat."""
        parent, name = self._place(path)
        old = self.nodes.get(parent.children.get(name, 0))
        ino = ino or (unpack_attributes(old.attributes).ino if old else next(self._numbers))
        return self._add(path, stat.S_IFREG | 0o644, ino, len(content), content, fields)

    def add_symlink(self, path: bytes, target: bytes) -> int:
        """A symbolic link."""
        return self._add(path, stat.S_IFLNK | 0o777, next(self._numbers), len(target), target, {})

    def add_directory(self, path: bytes) -> int:
        """A directory."""
        return self._add(path, stat.S_IFDIR | 0o755, next(self._numbers), 4096, b"", {})

    def remove(self, path: bytes) -> None:
        """Remove a name; its node lives on for whoever knows it."""
        parent, name = self._place(path)
        del parent.children[name]

    def _place(self, path: bytes) -> tuple[FakeNode, bytes]:
        *folders, name = path.split(b"/")
        node = self.nodes[ROOT]
        for folder in folders:
            node = self.nodes[node.children[folder]]
        return node, name

    def _add(self, path: bytes, mode: int, ino: int, size: int, content: bytes, fields: dict[str, int]) -> int:
        parent, name = self._place(path)
        node_id = next(self._node_ids)
        parent_id = next(i for i, node in self.nodes.items() if node is parent)
        attributes = self._attributes(mode, ino, size, **fields)
        self.nodes[node_id] = FakeNode(attributes, name, content, parent=parent_id)
        parent.children[name] = node_id
        return node_id

    @staticmethod
    def _attributes(mode: int, ino: int, size: int, **fields: int) -> Attributes:
        times = (1_600_000_000,) * 3
        more = {"st_blksize": 4096, "st_blocks": (size + 511) // 512, "st_rdev": 0}
        more |= {f"st_{kind}time_ns": 1_600_000_000_123_456_789 for kind in "amc"} | fields
        ids = (os.getuid(), os.getgid())
        return pack_attributes(os.stat_result((mode, ino, 0, fields.get("st_nlink", 1), *ids, size, *times), more))

    # The rules

    def let_go(self) -> None:
        """Let all waiting calls go on; later ones wait again."""
        self._let_go.set()
        self._let_go = trio.Event()

    def reset(self) -> None:
        """No rules any more."""
        self.rules.clear()
        self.declining.clear()
        self.let_go()

    def _obey(self, method: str, subject: bytes) -> bool:
        """Count the call; raise if told so. True if it is to wait."""
        self.calls[method] += 1
        rule = self.rules.get(method)
        if rule is None or (rule.subject is not None and rule.subject != subject):
            return False
        if rule.exc is not None:
            raise rule.exc
        return rule.is_waiting

    async def _obey_async(self, method: str, subject: bytes) -> None:
        if not self._obey(method, subject):
            await trio.lowlevel.checkpoint()
            return
        with self._holding(method, subject):
            await self._let_go.wait()

    @contextmanager
    def _holding(self, method: str, subject: bytes) -> Iterator[None]:
        call = (method, subject)
        self.held.append(call)
        try:
            yield
        except trio.Cancelled:
            self.cancelled.append(call)
            raise
        finally:
            self.held.remove(call)

    def _declines(self, method: str, subject: bytes) -> bool:
        self._obey(method, subject)
        return method in self.declining

    def _node(self, node: int, method: str) -> FakeNode:
        if node != ROOT and not self.references[node] and node not in self.handles.values():
            self.misuse.append(f"{method} of node {node} without a reference")
        return self.nodes[node]

    # The interface

    def lookup_nowait(self, parent: int, name: bytes) -> Entry | None:
        return None if self._declines("lookup_nowait", name) else self._look_up(parent, name)

    async def lookup(self, parent: int, name: bytes) -> Entry:
        await self._obey_async("lookup", name)
        return self._look_up(parent, name)

    def _look_up(self, parent: int, name: bytes) -> Entry:
        directory = self._node(parent, "lookup")
        if not stat.S_ISDIR(unpack_attributes(directory.attributes).mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        node = directory.children.get(name)
        if node is None:
            return Entry(0, b"", self.ttl)
        self.references[node] += 1
        return Entry(node, self.nodes[node].attributes, self.ttl)

    def forget(self, node: int, count: int) -> None:
        if node == ROOT or self.references[node] < count:
            self.misuse.append(f"forget of {count} references on node {node}, which has {self.references[node]}")
        self.references[node] -= count
        if not self.references[node]:
            del self.references[node]
        self._obey("forget", self.nodes[node].name)  # last: a front end cannot give references back twice

    def getattr_nowait(self, node: int) -> tuple[Attributes, float] | None:
        found = self._node(node, "getattr")
        return None if self._declines("getattr_nowait", found.name) else (found.attributes, self.ttl)

    async def getattr(self, node: int) -> tuple[Attributes, float]:
        found = self._node(node, "getattr")
        await self._obey_async("getattr", found.name)
        return found.attributes, self.ttl

    async def readlink(self, node: int) -> bytes:
        found = self._node(node, "readlink")
        await self._obey_async("readlink", found.name)
        return found.content

    def open_nowait(self, node: int) -> int | None:
        return None if self._declines("open_nowait", self.nodes[node].name) else self._open(node)

    async def open(self, node: int) -> int:
        await self._obey_async("open", self.nodes[node].name)
        return self._open(node)

    def _open(self, node: int) -> int:
        self._node(node, "open")
        handle = next(self._handle_ids)
        self.handles[handle] = node
        return handle

    def release(self, handle: int) -> None:
        node = self.handles.pop(handle, None)
        if node is None:
            self.misuse.append(f"release of handle {handle}, which is not open")
        else:
            self._obey("release", self.nodes[node].name)  # last: a front end cannot release a handle twice

    def read_nowait(self, handle: int, offset: int, view: memoryview, *, node: int = 0) -> int | None:
        found = self._opened(handle, "read") if handle else self._node(node, "read")
        return None if self._declines("read_nowait", found.name) else self._read(found, offset, view)

    async def read(self, handle: int, offset: int, view: memoryview, *, node: int = 0) -> int:
        found = self._opened(handle, "read") if handle else self._node(node, "read")
        await self._obey_async("read", found.name)
        return self._read(found, offset, view)

    @staticmethod
    def _read(found: FakeNode, offset: int, view: memoryview) -> int:
        data = found.content[offset : offset + len(view)]
        view[: len(data)] = data
        view[len(data) :] = b"!" * (len(view) - len(data))  # what no reader may see
        return len(data)

    def keep_superseded(self) -> None:
        self.keeps_superseded = True

    async def lseek(self, handle: int, offset: int, whence: int, *, node: int = 0) -> int:
        found = self._opened(handle, "lseek") if handle else self._node(node, "lseek")
        await self._obey_async("lseek", found.name)
        if offset >= len(found.content):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return offset if whence == os.SEEK_DATA else len(found.content) // 2  # a hole that only LSEEK can tell

    def _opened(self, handle: int, method: str) -> FakeNode:
        if handle not in self.handles:
            self.misuse.append(f"{method} of handle {handle}, which is not open")
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.nodes[self.handles[handle]]

    def opendir(self, node: int) -> int:
        self._obey("opendir", self._node(node, "opendir").name)
        handle = next(self._handle_ids)
        self.directory_handles[handle] = node
        return handle

    def releasedir(self, handle: int) -> None:
        node = self.directory_handles.pop(handle, None)
        if node is None:
            self.misuse.append(f"releasedir of handle {handle}, which is not open")
        else:
            self._obey("releasedir", self.nodes[node].name)

    def readdir_nowait(self, handle: int, index: int, count: int) -> list[DirEntry] | None:
        if self._declines("readdir_nowait", self._directory(handle, "readdir").name):
            return None
        return self._list(handle)[index : index + count]

    async def readdir(self, handle: int, index: int, count: int) -> list[DirEntry]:
        await self._obey_async("readdir", self._directory(handle, "readdir").name)
        return self._list(handle)[index : index + count]

    def _list(self, handle: int) -> list[DirEntry]:
        directory = self.nodes[self.directory_handles[handle]]
        names = [(b".", directory), (b"..", self.nodes[directory.parent])]
        names += [(name, self.nodes[node]) for name, node in directory.children.items()]
        stats = [(name, unpack_attributes(node.attributes)) for name, node in names]
        return [DirEntry(name, st.ino, st.mode >> 12) for name, st in stats]

    def known_entry(self, handle: int, name: bytes) -> Entry | None:
        directory = self.directory_handles[handle]
        is_declined = self._declines("known_entry", name) or name not in self.nodes[directory].children
        return None if is_declined else self._look_up(directory, name)

    def advise_attributes(self, handle: int, index: int) -> None:
        self._obey("advise_attributes", self._directory(handle, "advise_attributes").name)

    def _directory(self, handle: int, method: str) -> FakeNode:
        if handle not in self.directory_handles:
            self.misuse.append(f"{method} of directory handle {handle}, which is not open")
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.nodes[self.directory_handles[handle]]

    def statfs_nowait(self) -> os.statvfs_result | None:
        return None if self._declines("statfs_nowait", b"/") else self._statfs()

    async def statfs(self) -> os.statvfs_result:
        await self._obey_async("statfs", b"/")
        return self._statfs()

    @staticmethod
    def _statfs() -> os.statvfs_result:
        # bsize, frsize, blocks, bfree, bavail, files, ffree, favail, flag, namemax
        return os.statvfs_result((65536, 4096, 1000, 500, 400, 300, 200, 100, 0, 255))
