"""What the file system answers: names, attributes, listings, opens and reads, neutral to the front end that asks.

Nothing here knows FUSE messages, and nothing requires open and release to be paired: a handle only adds pins. A
`*_nowait` method answers from memory, or returns None when it would have to wait; its coroutine then does the whole
thing. All of it runs in the event loop's thread, so what stands between two awaits is atomic.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

import trio

from dmfs.errors import StaleFile, without_traceback
from dmfs.fuse.inodes import Directory, InodeTable, Listing, Node
from dmfs.fuse.ttl import AWAY_TTL, FOREVER, MetadataTtl, is_away
from dmfs.log import ErrorLog
from dmfs.metrics import Metrics, Served
from dmfs.tiers.manager import Manager
from dmfs.tiers.pending import Pending
from dmfs.types import (
    Attributes,
    Clock,
    DataFile,
    DirEntry,
    Entry,
    FileVersion,
    Stat,
    VersionFrom,
    file_key,
    unpack_attributes,
)

STATVFS_TTL = 1.0  # seconds
STATVFS_WAIT = 2.0  # seconds df waits for a source that is slow, before it gets the last numbers known
ADVISE_AHEAD = 256  # names whose attributes are fetched in advance while a listing with attributes goes on
ADVISE_BATCH = 16  # of these in one thread call

MAX_KNOWN_FILES = 16_384  # files whose keys are remembered, about 500 bytes each; then all are computed anew
MAX_NEGATIVES = 4096  # missing names remembered per directory; then all are forgotten, which costs a stat each

_DOT_ENTRIES = 2  # "." and "..", which come before the names of a listing


class _FileHandle(NamedTuple):
    file: DataFile
    served: Served | None  # where its reads are counted; None: by what each read finds


class _DirectoryHandle:
    __slots__ = ("directory", "listing", "stated")

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.listing: Listing | None = None
        self.stated = 0  # names up to this index have had their attributes asked for in advance


class Operations:
    """The operations of a read-only file system over a source and its tiers.

    Every method raises OSError or StaleFile for what the reader is to be told; see errors.to_errno. Node ids and
    handles are integers.

    Attributes:
        metrics, errors: where a front end counts and logs what it meets.
        manager: where the bytes come from.
        on_name_changed: called with a directory's node and a name that the source has changed, before the TTL is over.
    """

    def __init__(
        self,
        manager: Manager,
        root_attributes: Attributes,
        *,
        nursery: trio.Nursery,
        metrics: Metrics,
        errors: ErrorLog,
        clock: Clock,
        ttl: MetadataTtl,
        dataset_id: bytes,
        version_from: VersionFrom,
    ) -> None:
        self.metrics = metrics
        self.errors = errors
        self.manager = manager
        self._source = manager.source
        self._nursery = nursery
        self._clock = clock
        self._ttl = ttl
        self._dataset_id = dataset_id
        self._version_from = version_from
        self._inodes = InodeTable(root_attributes, version_from=version_from)
        self._refresh(self._inodes.root, root_attributes)
        self._handle_ids = itertools.count(1)
        self.on_name_changed: Callable[[int, bytes], None] = lambda parent, name: None
        self._files: dict[int, _FileHandle] = {}
        self._known_files: dict[int, tuple[Attributes, _FileHandle]] = {}  # by node, and of which attributes
        self._kept: dict[int, DataFile] = {}  # superseded versions whose copies are held, see `keep_superseded`
        self._directories: dict[int, _DirectoryHandle] = {}
        self._questions: dict[tuple[int, bytes], Pending] = {}  # by directory id and name; the root is (0, b"")
        self._statvfs: tuple[os.statvfs_result, float] | None = None  # the last numbers, and until when they hold
        self._statvfs_question: Pending | None = None
        manager.on_changed = self._changed_at_source

    def statistics(self) -> dict[str, int]:
        """How much is known and open: `{inodes, files_open, directories_open}`."""
        return {"inodes": len(self._inodes), "files_open": len(self._files), "directories_open": len(self._directories)}

    # ---- names and attributes

    def lookup_nowait(self, parent: int, name: bytes) -> Entry | None:
        """The entry of a name, if it is known and fresh.

        Counts one reference on the node, unless the entry is negative.
        """
        directory = self._directory(parent)
        now = self._clock.monotonic()
        node = directory.children.get(name)
        if node is not None:
            if node.expires > now and not node.is_superseded:
                self._inodes.refer(node)
                return Entry(node.id, node.attributes, node.expires - now)
            return None
        until = directory.negatives.get(name)
        if until is not None and until > now:
            return Entry(0, b"", until - now)
        return None

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry of a name. Simultaneous look-ups of one name ask the source once."""
        directory = self._directory(parent)
        # The answer to somebody else may be one that is not to be kept (a TTL of 0): then this is asked anew, as it
        # would be natively.
        while (entry := self.lookup_nowait(parent, name)) is None:
            if not await self._wait_for_answer((parent, name)):
                with self._asking([(parent, name)]):
                    return await self._ask_source(directory, name)
        return entry

    @contextlib.contextmanager
    def _asking(self, keys: list[tuple[int, bytes]]) -> Iterator[None]:
        """The source is asked for these names, until the block ends."""
        question = Pending()
        self._questions.update(dict.fromkeys(keys, question))
        try:
            yield
        except Exception as exc:
            question.fail(exc)
            raise
        finally:
            for key in keys:
                del self._questions[key]
            question.finish()

    async def _wait_for_answer(self, key: tuple[int, bytes]) -> bool:
        """Wait until somebody else's question is answered; False if nobody is asking. Raises what they get."""
        question = self._questions.get(key)
        if question is None:
            return False
        await question.wait()
        return True

    async def _ask_source(self, directory: Directory, name: bytes) -> Entry:
        try:
            attributes = await self._source.lstat(_join(directory.path(), name))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return self._not_there(directory, name)
            if exc.errno == errno.ENOTDIR:
                # What was a directory is none any more: let the kernel walk the path again.
                directory.expires = 0.0
                raise StaleFile(f"{os.fsdecode(directory.path())} is no directory any more") from exc
            node = directory.children.get(name)
            if node is None or not is_away(exc):
                raise
            self._extend(node)
        else:
            node = self._inodes.update(directory, name, attributes)
            self._refresh(node, attributes)
        self._inodes.refer(node)
        return Entry(node.id, node.attributes, max(0.0, node.expires - self._clock.monotonic()))

    def _not_there(self, directory: Directory, name: bytes) -> Entry:
        self._inodes.remove(directory, name)
        ttl = self._ttl.of_missing(directory.attributes)
        if ttl:
            if len(directory.negatives) >= MAX_NEGATIVES:
                directory.negatives.clear()
            directory.negatives[name] = self._clock.monotonic() + ttl
        return Entry(0, b"", ttl)

    def _refresh(self, node: Node, attributes: Attributes) -> None:
        """The source gave these attributes just now. A directory that has changed is listed anew by the next open."""
        if isinstance(node, Directory) and node.listing is not None and _has_changed(node.attributes, attributes):
            node.listing = None
        node.attributes = attributes
        node.expires = self._clock.monotonic() + self._ttl.of(attributes)

    def _extend(self, node: Node) -> None:
        """The source is away: what is known goes on being served, for a moment at a time."""
        node.expires = self._clock.monotonic() + AWAY_TTL
        self.metrics.stale_served += 1

    def forget(self, node: int, count: int) -> None:
        """The kernel takes back `count` references."""
        self._inodes.forget(node, count)
        if node in self._kept and node not in self._inodes:
            self.manager.close(self._kept.pop(node))

    def getattr_nowait(self, node: int) -> tuple[Attributes, float] | None:
        """Attributes and for how many seconds they hold, if they are fresh."""
        inode = self._inodes.get(node)
        if inode.is_superseded:
            return inode.attributes, FOREVER
        left = inode.expires - self._clock.monotonic()
        return (inode.attributes, left) if left > 0 else None

    async def getattr(self, node: int) -> tuple[Attributes, float]:
        """Attributes and for how many seconds they hold.

        A node whose name leads to another version by now keeps the attributes of its own.
        """
        inode = self._inodes.get(node)
        while (answer := self.getattr_nowait(node)) is None:
            key = (inode.parent.id, inode.name) if inode.parent else (0, b"")
            if not await self._wait_for_answer(key):
                with self._asking([key]):
                    return await self._ask_for_attributes(inode)
        return answer

    async def _ask_for_attributes(self, inode: Node) -> tuple[Attributes, float]:
        try:
            attributes = await self._source.lstat(inode.path())
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                if inode.parent is None:
                    raise
                self._supersede(inode)
            elif is_away(exc):
                self._extend(inode)
            else:
                raise
        else:
            if self._inodes.is_same(unpack_attributes(inode.attributes), unpack_attributes(attributes)):
                self._refresh(inode, attributes)
            elif inode.parent is None:
                raise StaleFile("the source directory was replaced")
            else:
                self._supersede(inode)
        return inode.attributes, max(0.0, inode.expires - self._clock.monotonic())

    def _supersede(self, inode: Node) -> None:
        """A node's name leads elsewhere now. A hard-linked file may have other names, and is asked for by them next."""
        if inode.parent is not None and inode.parent.children.get(inode.name) is inode:
            self._inodes.remove(inode.parent, inode.name)
        else:
            self._inodes.supersede(inode)

    def _changed_at_source(self, file: DataFile) -> None:
        """A read found another version than the one that was looked up: the next look-up asks the source."""
        node = self._inodes.find(file.path)
        if node is None or node.parent is None:
            return
        st = unpack_attributes(node.attributes)
        if FileVersion(st.size, st.mtime_ns, st.ctime_ns) == file.version:  # else the name leads to a newer one already
            node.expires = 0.0
            self.on_name_changed(node.parent.id, node.name)

    async def readlink(self, node: int) -> bytes:
        """The target of a symbolic link, as stored."""
        return await self._source.readlink(self._inodes.get(node).path())

    # ---- files

    def open_nowait(self, node: int) -> int | None:
        """Open a file of which a copy is here: a handle."""
        opened = self._unopened(node)
        return self._add_handle(opened) if self.manager.open_nowait(opened.file) else None

    async def open(self, node: int) -> int:
        """Open a file: a handle. A small file is fetched before this returns."""
        file = self._unopened(node).file
        try:
            served = await self.manager.open(file)
        except StaleFile:
            self._changed_at_source(file)
            raise
        return self._add_handle(_FileHandle(file, served))

    def _add_handle(self, opened: _FileHandle) -> int:
        handle = next(self._handle_ids)
        self._files[handle] = opened
        return handle

    def _unopened(self, node: int) -> _FileHandle:
        """The file of a node, as it is read without being open."""
        inode = self._inodes.get(node)
        known = self._known_files.get(node)
        if known is not None and known[0] is inode.attributes:
            return known[1]
        st = unpack_attributes(inode.attributes)
        opened = _FileHandle(self._data_file(inode.path(), st), None)
        if st.nlink == 1:  # a file of several names may be found by another one next
            if len(self._known_files) >= MAX_KNOWN_FILES:
                self._known_files.clear()
            self._known_files[node] = (inode.attributes, opened)
        return opened

    def _data_file(self, path: bytes, st: Stat) -> DataFile:
        if not st.is_regular:
            raise OSError(errno.EISDIR if st.is_directory else errno.EINVAL, "not a regular file")
        version = FileVersion(st.size, st.mtime_ns, st.ctime_ns)
        shared_ino = st.ino if st.nlink > 1 else 0
        key = file_key(self._dataset_id, path, version, shared_ino=shared_ino, version_from=self._version_from)
        return DataFile(path, version, key)

    def file_of(self, handle: int) -> DataFile:
        """Which file is open by a handle."""
        return self._files[handle].file

    async def find_file(self, path: bytes) -> tuple[int, DataFile]:
        """A file by its path: the node by which the kernel knows it, 0 if it does not, and the file.

        Asks the source where the path is not known. Raises OSError.
        """
        node = self._inodes.find(path)
        if node is not None and node.references:
            return node.id, self._unopened(node.id).file
        return 0, self._data_file(path, unpack_attributes(await self._source.lstat(path)))

    def release(self, handle: int) -> None:
        """The last user of a handle closed it."""
        self.manager.close(self._files.pop(handle).file)

    def keep_superseded(self) -> None:
        """From now on hold the copy of a superseded version until the kernel forgets its node.

        For a front end that reads by node: whoever has the old version open has no handle that would hold it.
        """
        self._inodes.on_superseded = self._keep

    def _keep(self, node: Node) -> None:
        if unpack_attributes(node.attributes).is_regular and node.id not in self._kept:
            file = self._unopened(node.id).file
            if self.manager.hold_copy(file):
                self._kept[node.id] = file

    def read_nowait(self, handle: int, offset: int, view: memoryview, *, node: int = 0) -> int | None:
        """Read into `view`: the number of bytes, less than its length only at the end of the file.

        Args:
            handle: from an open; 0: the file of `node`, which was not opened.
        """
        opened = self._files[handle] if handle else self._unopened(node)
        size = opened.file.version.size - offset
        if size < len(view):
            if size <= 0:
                return 0
            view = view[:size]
        served = self.manager.read_nowait(opened.file, view, offset)
        return None if served is None else _count(opened.served or served, len(view))

    async def read(self, handle: int, offset: int, view: memoryview, *, node: int = 0) -> int:
        """As `read_nowait`. A cancelled read may still write into `view`."""
        opened = self._files[handle] if handle else self._unopened(node)
        view = view[: max(0, opened.file.version.size - offset)]
        if not len(view):
            return 0
        served = await self.manager.read(opened.file, view, offset)
        return _count(opened.served or served, len(view))

    async def lseek(self, handle: int, offset: int, whence: int, *, node: int = 0) -> int:
        """SEEK_DATA or SEEK_HOLE. `handle` and `node` as for `read_nowait`."""
        opened = self._files[handle] if handle else self._unopened(node)
        return await self.manager.seek(opened.file, offset, whence)

    # ---- directories

    def opendir(self, node: int) -> int:
        """Open a directory: a handle. Its listing is taken by the first read."""
        handle = next(self._handle_ids)
        self._directories[handle] = _DirectoryHandle(self._directory(node))
        return handle

    def releasedir(self, handle: int) -> None:
        """The last user of a directory handle closed it."""
        del self._directories[handle]

    def readdir_nowait(self, handle: int, index: int, count: int) -> list[DirEntry] | None:
        """At most `count` entries from `index` on, "." and ".." first; none at the end.

        Index 0 begins anew, with a fresh listing.
        """
        opened = self._directories[handle]
        if index == 0:
            listing = opened.directory.listing
            if listing is None or listing.error or listing.expires <= self._clock.monotonic():
                return None
            opened.listing = listing
        return self._entries(opened, index, count)

    def _entries(self, opened: _DirectoryHandle, index: int, count: int) -> list[DirEntry] | None:
        listing = opened.listing
        if listing is None:
            return None
        start = max(0, index - _DOT_ENTRIES)
        entries = listing.entries(start, start + count)
        if not entries and not listing.is_complete:
            return None
        if index < _DOT_ENTRIES:
            entries = self._dot_entries(opened.directory)[index:] + entries
        return entries

    @staticmethod
    def _dot_entries(directory: Directory) -> list[DirEntry]:
        own = unpack_attributes(directory.attributes).ino
        parent = unpack_attributes(directory.parent.attributes).ino if directory.parent else own
        return [DirEntry(b".", own, stat.S_IFDIR >> 12), DirEntry(b"..", parent, stat.S_IFDIR >> 12)]

    async def readdir(self, handle: int, index: int, count: int) -> list[DirEntry]:
        """As `readdir_nowait`. Returns as soon as there are entries, while the source may still be read."""
        opened = self._directories[handle]
        if index == 0 or opened.listing is None:
            opened.listing = self._listing(opened.directory)
        while True:
            entries = self._entries(opened, index, count)
            if entries is not None and (len(entries) > _DOT_ENTRIES or index or opened.listing.is_complete):
                return entries
            if opened.listing.error is not None:
                raise without_traceback(opened.listing.error)
            await opened.listing.grown.wait()

    def _listing(self, directory: Directory) -> Listing:
        """The listing of a directory: the fresh one, the one that is being read, or a new one."""
        listing = directory.listing
        now = self._clock.monotonic()
        if listing is not None and listing.error is None and (listing.expires > now or not listing.is_over):
            return listing
        new = Listing()
        directory.listing = new
        self._nursery.start_soon(self._read_listing, directory, new, listing)
        return new

    async def _read_listing(self, directory: Directory, listing: Listing, known: Listing | None) -> None:
        """Read a directory of the source into `listing`; `known` is an expired one, for when the source is away."""

        def on_start(attributes: Attributes) -> None:
            if self._inodes.is_same(unpack_attributes(directory.attributes), unpack_attributes(attributes)):
                self._refresh(directory, attributes)
            # With a TTL of 0 the listing is for those who asked while it was read, and for nobody later.
            listing.expires = self._clock.monotonic() + self._ttl.of(attributes)
            directory.listing = listing

        if known is not None and not known.is_complete:
            known = None
        error: Exception | None = None
        try:
            await self._source.list_directory(directory.path(), on_start, listing.extend)
        except OSError as exc:
            if known is not None and is_away(exc) and not len(listing):
                listing.extend(known.entries(0, len(known)))
                listing.expires = self._clock.monotonic() + AWAY_TTL
                self.metrics.stale_served += 1
            else:
                error = without_traceback(exc)
        except Exception as exc:
            self.surprised("listing a directory", exc)
            error = OSError(errno.EIO, os.strerror(errno.EIO))
        listing.finish(error)
        if error is not None and directory.listing is listing:
            directory.listing = known

    def surprised(self, doing: str, exc: Exception) -> None:
        """A fault in the background, where no reader's request is there to be answered."""
        self.metrics.surprises += 1
        self.errors.add(f"fault in {doing}: {exc!r}", exc, kind=f"{doing} {type(exc).__name__}")

    def known_entry(self, handle: int, name: bytes) -> Entry | None:
        """The entry of a name just listed, if its attributes are known and fresh; counts a reference then."""
        directory = self._directories[handle].directory
        if name not in directory.children:
            return None
        return self.lookup_nowait(directory.id, name)

    def advise_attributes(self, handle: int, index: int) -> None:
        """A listing with attributes goes on at `index`: fetch those of the coming names in advance."""
        opened = self._directories[handle]
        if opened.listing is None:
            return
        index = max(0, index - _DOT_ENTRIES)
        if opened.stated > index + ADVISE_AHEAD // 2:
            return
        start = max(index, opened.stated)
        coming = opened.listing.names(start, index + ADVISE_AHEAD)  # fewer, while the source is being read
        opened.stated = start + len(coming)
        names = [name for name in coming if name not in opened.directory.children]
        for i in range(0, len(names), ADVISE_BATCH):
            self._nursery.start_soon(self._fetch_attributes, opened.directory, names[i : i + ADVISE_BATCH])

    async def _fetch_attributes(self, directory: Directory, names: list[bytes]) -> None:
        names = [name for name in names if (directory.id, name) not in self._questions]
        if not names:
            return
        path = directory.path()
        try:
            with self._asking([(directory.id, name) for name in names]):
                results = await self._source.lstat_many([_join(path, name) for name in names])
                for name, attributes in zip(names, results, strict=True):
                    if not isinstance(attributes, OSError):
                        self._refresh(self._inodes.update(directory, name, attributes), attributes)
        except Exception as exc:
            self.surprised("fetching attributes", exc)

    # ---- the whole

    def statfs_nowait(self) -> os.statvfs_result | None:
        """The numbers of the source's file system, if they were asked for just now."""
        if self._statvfs is not None and self._statvfs[1] > self._clock.monotonic():
            return self._statvfs[0]
        return None

    async def statfs(self) -> os.statvfs_result:
        """The numbers of the source's file system; the last ones known if the source does not answer in time."""
        question = self._statvfs_question
        if question is None:
            question = self._statvfs_question = Pending()
            self._nursery.start_soon(self._ask_for_statvfs, question)
        with trio.move_on_after(STATVFS_WAIT):
            await question.done.wait()
        if self._statvfs is None:
            raise without_traceback(question.error or OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        result, _ = self._statvfs
        self._statvfs = (result, self._clock.monotonic() + STATVFS_TTL)
        return result

    async def _ask_for_statvfs(self, question: Pending) -> None:
        """In the background, so that a source that hangs is asked by one call, however many there are that wait."""
        try:
            self._statvfs = (await self._source.statvfs(), 0.0)
        except OSError as exc:
            question.fail(exc)
        except Exception as exc:
            self.surprised("asking for the free space", exc)
        finally:
            self._statvfs_question = None
            question.finish()

    def _directory(self, node: int) -> Directory:
        inode = self._inodes.get(node)
        if not isinstance(inode, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory")
        return inode


def _count(served: Served, size: int) -> int:
    served.reads += 1
    served.bytes += size
    return size


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _has_changed(old: Attributes, new: Attributes) -> bool:
    before, after = unpack_attributes(old), unpack_attributes(new)
    return before.mtime_ns != after.mtime_ns or before.ctime_ns != after.ctime_ns
