"""Thin pyfuse3 adapter: converts types and errors only. What the tree looks like is decided in operations.py.

The only module that imports pyfuse3, an optional dependency: without it the module still imports, and `PortableSession`
says why. pyfuse3 keeps its state in globals, so a process has one session at a time. What the library cannot do
(interrupts, LSEEK, listings without look-ups, inode numbers apart from node ids) is listed in docs/semantics.md.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import tempfile
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import trio

from dmfs.errors import FuseUnavailable, StaleFile, to_errno
from dmfs.types import NANOSECONDS, Attributes, DirEntry, Entry, unpack_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dmfs.fuse.operations import Operations

_import_failure: ImportError | None = None
try:
    import pyfuse3
except ImportError as exc:
    _import_failure = exc

if TYPE_CHECKING:
    _LibraryOperations = pyfuse3.Operations
else:
    _LibraryOperations = object if _import_failure else pyfuse3.Operations

Handler = TypeVar("Handler", bound="Callable[..., Coroutine[Any, Any, Any]]")

ROOT = 1
FIRST_SUBSTITUTE = 1 << 63  # file systems hardly ever give inode numbers from here on
MAX_REQUESTS = 512  # in work at once: above the source calls that may hang (256), so that those do not stop the rest
IDLE_WORKERS = 8  # pyfuse3 workers kept waiting; each has a receive buffer of 1 MiB, of which a request touches a page
LISTING_STEP = 64  # names asked for at a time; a reply of 4 KiB holds about 24, one of 32 KiB about 190


class PortableSession:
    """One mount served through pyfuse3."""

    def __init__(self, operations: Operations, *, mountpoint: str, fsname: str, allow_other: bool) -> None:
        """`fsname` is what `df` shows as the device. Raises FuseUnavailable if pyfuse3 cannot be imported."""
        if _import_failure is not None:
            raise FuseUnavailable(
                f"pyfuse3 cannot be used ({_import_failure}): install dmfs[pyfuse3], or mount with --front-end kernel"
            ) from _import_failure
        self._operations = operations
        self._mountpoint = mountpoint
        self._options = _mount_options(fsname, allow_other=allow_other)
        self._serving = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Mount, report started once the kernel has been answered, and serve until unmounted, closed or cancelled.

        When it returns nothing is mounted any more, and `operations` has got the kernel's references back.

        Raises:
            FuseUnavailable: libfuse could not mount, with its own words.
        """
        handlers = _Handlers(self._operations, task_status.started)
        self._mount(handlers)
        try:
            with self._serving:
                await pyfuse3.main(IDLE_WORKERS, MAX_REQUESTS)
        finally:
            pyfuse3.close(unmount=True)  # closes /dev/fuse, then unmounts lazily unless that was done already
            handlers.forget_all()
        if not handlers.is_initialized and not self._serving.cancelled_caught:
            raise FuseUnavailable(
                f"{self._mountpoint} was unmounted before the kernel and libfuse agreed on a protocol"
            )

    def close(self) -> None:
        """Unmount lazily and end `run` at once; whoever has files open there gets ENOTCONN."""
        self._serving.cancel()

    def _mount(self, handlers: _Handlers) -> None:
        with tempfile.TemporaryFile() as said:  # libfuse and fusermount3 give their reasons on standard error alone
            stderr = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                pyfuse3.init(handlers, self._mountpoint, self._options)
            except RuntimeError as exc:
                said.seek(0)
                reason = " ".join(said.read().decode(errors="replace").split()) or str(exc)
                raise FuseUnavailable(f"libfuse could not mount {self._mountpoint}: {reason}") from exc
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)


def _mount_options(fsname: str, *, allow_other: bool) -> set[str]:
    # pyfuse3 encodes options as ASCII, libfuse splits them at commas
    name = fsname.encode("ascii", "backslashreplace").decode().replace("\\", "\\\\").replace(",", "\\,")
    options = {"ro", "nosuid", "nodev", "default_permissions", "subtype=dmfs", f"fsname={name}"}
    return options | {"allow_other"} if allow_other else options


class _Numbers:
    """Two-way map between the node ids of `operations` and the numbers shown to the kernel, with its references.

    pyfuse3 makes node id and inode number one. So the source's number is shown where no other live node has it, and one
    from `FIRST_SUBSTITUTE` upward else: to a new version of a file, as long as the kernel knows the old one.

    Attributes:
        references: number -> references of the kernel's; the root has none.
    """

    def __init__(self) -> None:
        self._nodes = {ROOT: ROOT}
        self._shown = {ROOT: ROOT}
        self._substitutes = itertools.count(FIRST_SUBSTITUTE)
        self.references: dict[int, int] = {}

    def node(self, number: int) -> int:
        """The node id behind a number. Raises StaleFile if the kernel has no reference on it."""
        try:
            return self._nodes[number]
        except KeyError:
            raise StaleFile(f"the kernel asked for inode {number}, on which it has no reference") from None

    def count(self, node: int, ino: int) -> int:
        """Count a reference on `node`, whose inode number at the source is `ino`. Returns the number to show."""
        number = self._shown.get(node)
        if number is None:
            number = ino if ino > ROOT and ino not in self._nodes else self.substitute()
            self._nodes[number] = node
            self._shown[node] = number
        self.references[number] = self.references.get(number, 0) + 1
        return number

    def substitute(self) -> int:
        """A number that no live node has."""
        return next(number for number in self._substitutes if number not in self._nodes)

    def forget(self, number: int, count: int) -> int | None:
        """Take references back. Returns the node id; None where none was counted: the root, and names only listed."""
        if number not in self.references:
            return None
        node = self._nodes[number]
        self.references[number] -= count
        if self.references[number] <= 0:
            del self.references[number], self._nodes[number], self._shown[node]
        return node


def _guarded(handler: Handler) -> Handler:
    """Turn every exception into FUSEError, the only one that does not end the mount. trio.Cancelled passes."""

    @functools.wraps(handler)
    async def guard(self: _Handlers, *arguments: Any) -> Any:
        try:
            return await handler(self, *arguments)
        except Exception as exc:
            raise pyfuse3.FUSEError(self.errno_of(exc, handler.__name__)) from exc

    return cast("Handler", guard)


async def _refuse(*_arguments: object) -> NoReturn:
    raise pyfuse3.FUSEError(errno.EROFS)


_read_only: Any = _refuse  # stands for handlers of many signatures


class _Handlers(_LibraryOperations):
    """What pyfuse3 calls. Its base class answers ENOSYS to what is not here: the kernel then does access, flush, fsync
    and poll by itself, and says that extended attributes are not supported.
    """

    supports_dot_lookup = False  # NFS exports look up "." and "..", which `Operations` does not offer

    # With the mount option `ro` the kernel refuses all this itself, unless somebody remounts it
    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = create = write = _read_only
    setxattr = removexattr = _read_only

    def __init__(self, operations: Operations, on_initialized: Callable[[], None]) -> None:
        super().__init__()
        self._operations = operations
        self._on_initialized = on_initialized
        self._numbers = _Numbers()
        self._directories: dict[int, int] = {}  # handle -> number of the directory, which readdir is not told
        self.is_initialized = False  # the kernel and libfuse have agreed on a protocol

    def errno_of(self, exc: Exception, handler: str) -> int:
        """The errno to answer; a surprise is logged once, counted, and EIO."""
        if (number := to_errno(exc)) is not None:
            return number
        kind = f"{type(exc).__name__} in {handler}"
        self._operations.errors.add(f"unexpected {kind}: {exc}", exc, kind=kind)
        self._operations.metrics.surprises += 1
        return errno.EIO

    def forget_all(self) -> None:
        """Give back the references that the kernel had when it unmounted: it sends no FORGET for those."""
        for number, count in list(self._numbers.references.items()):
            self._forget(number, count)

    def init(self) -> None:
        self.is_initialized = True
        self._on_initialized()

    @_guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        parent = self._numbers.node(parent_inode)
        found = self._operations.lookup_nowait(parent, name) or await self._operations.lookup(parent, name)
        if found.node:
            return self._counted(found)
        negative = pyfuse3.EntryAttributes()
        negative.st_ino = 0
        negative.entry_timeout = found.ttl
        return negative

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for number, count in inode_list:
            self._forget(number, count)

    @_guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        node = self._numbers.node(inode)
        attributes, ttl = self._operations.getattr_nowait(node) or await self._operations.getattr(node)
        return _entry_attributes(inode, attributes, ttl)

    @_guarded
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._operations.readlink(self._numbers.node(inode))

    @_guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = self._operations.statfs_nowait() or await self._operations.statfs()
        data = pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(data, f"f_{name}", getattr(found, f"f_{name}"))
        return data

    @_guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        node = self._numbers.node(inode)
        handle = self._operations.open_nowait(node)
        if handle is None:
            handle = await self._operations.open(node)
        return pyfuse3.FileInfo(fh=handle, keep_cache=True)  # a node is one version of a file, so its pages never age

    @_guarded
    async def read(self, fh: int, off: int, size: int) -> bytes:
        view = memoryview(bytearray(size))
        count = self._operations.read_nowait(fh, off, view)
        if count is None:
            count = await self._operations.read(fh, off, view)
        return view[:count]  # type: ignore[return-value]  # pyfuse3 takes any buffer

    @_guarded
    async def release(self, fh: int) -> None:
        self._operations.release(fh)

    @_guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        handle = self._operations.opendir(self._numbers.node(inode))
        self._directories[handle] = inode
        return handle

    @_guarded
    async def releasedir(self, fh: int) -> None:
        self._directories.pop(fh, None)
        self._operations.releasedir(fh)

    @_guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        told: list[int] = []  # numbers in this reply on which a reference is counted
        try:
            await self._list(fh, start_id, token, told)
        except BaseException:
            for number in told:  # the kernel gets no part of this reply
                self._forget(number, 1)
            raise

    async def _list(self, handle: int, index: int, token: pyfuse3.ReaddirToken, told: list[int]) -> None:
        while True:
            names = self._operations.readdir_nowait(handle, index, LISTING_STEP)
            if names is None:
                names = await self._operations.readdir(handle, index, LISTING_STEP)
            if not names:
                return
            self._operations.advise_attributes(handle, index)
            for name in names:
                index += 1
                found = await self._listed(handle, name)
                if isinstance(found, Entry):
                    if not found.node:  # removed since
                        continue
                    entry = self._counted(found)
                    told.append(entry.st_ino)
                else:
                    entry = _only_listed(found, name.type)
                if not pyfuse3.readdir_reply(token, name.name, entry, index):
                    if isinstance(found, Entry):
                        self._forget(told.pop(), 1)
                    return

    async def _listed(self, handle: int, name: DirEntry) -> Entry | int:
        """The entry of a listed name; for one without an entry the number to show."""
        directory = self._directories[handle]
        if name.name in (b".", b".."):  # the kernel takes number and type, and no reference
            return directory if name.name == b"." else name.ino
        parent = self._numbers.node(directory)
        try:
            return (
                self._operations.known_entry(handle, name.name)
                or self._operations.lookup_nowait(parent, name.name)
                or await self._operations.lookup(parent, name.name)
            )
        except OSError:  # as natively: the name is shown, and a stat of it says what is wrong
            return self._numbers.substitute()

    def _counted(self, found: Entry) -> pyfuse3.EntryAttributes:
        number = self._numbers.count(found.node, unpack_attributes(found.attributes).ino)
        return _entry_attributes(number, found.attributes, found.ttl)

    def _forget(self, number: int, count: int) -> None:
        node = self._numbers.forget(number, count)
        if node is not None:
            try:
                self._operations.forget(node, count)
            except Exception as exc:  # FORGET has no reply
                self.errno_of(exc, "forget")


def _entry_attributes(number: int, attributes: Attributes, ttl: float) -> pyfuse3.EntryAttributes:
    st = unpack_attributes(attributes)
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = number
    entry.entry_timeout = entry.attr_timeout = ttl
    for name in ("mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"):
        setattr(entry, f"st_{name}", getattr(st, name))
    entry.st_atime_ns = st.atime * NANOSECONDS + st.atime_nsec
    entry.st_mtime_ns = st.mtime_ns
    entry.st_ctime_ns = st.ctime_ns
    return entry


def _only_listed(number: int, file_type: int) -> pyfuse3.EntryAttributes:
    """A name with its number and DT_* type, and nothing that the kernel may keep."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = number
    entry.st_mode = file_type << 12
    entry.entry_timeout = entry.attr_timeout = 0
    return entry
