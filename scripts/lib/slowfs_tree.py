"""What slowfs shows: the folder below, as FUSE nodes, handles and answers. Neither time nor counting: slowfs_server.py.

A node is a path and the inode that was found there. If another file takes the path, a look-up gives it another node,
and the old node answers ESTALE; a file that is open stays what it was.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from dmfs.fuse import abi

_LISTING_STEP = 256  # names fetched at once, so that the listing of a huge folder does not hold up everybody else


@dataclass(slots=True)
class _Node:
    path: bytes
    ino: int
    lookups: int = 0
    fds: list[int] = field(default_factory=list)  # open on it: what answers once the path is gone


class _Name(NamedTuple):
    ino: int
    type: int
    name: bytes


class _File(NamedTuple):
    node: _Node
    fd: int

    def close(self) -> None:
        self.node.fds.remove(self.fd)
        os.close(self.fd)


@dataclass(slots=True)
class _Listing:
    """An open folder: the names handed out so far, and the scan that gives the rest."""

    folder: bytes
    names: list[_Name] = field(default_factory=list)
    scan: "os._ScandirIterator[bytes]" = field(init=False)

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        """Begin anew; rewinddir(3) must show names that have come since."""
        if self.names:
            self.close()
        self.scan = os.scandir(self.folder)
        dots = ((b".", self.folder), (b"..", self.folder + b"/.."))
        self.names = [_Name(os.stat(path).st_ino, 4, name) for name, path in dots]

    def since(self, index: int) -> Iterator[_Name]:
        """The names from `index` on."""
        while True:
            while index >= len(self.names):
                more = [_Name(entry.inode(), _type(entry), entry.name) for entry in islice(self.scan, _LISTING_STEP)]
                if not more:
                    return
                self.names += more
            yield self.names[index]
            index += 1

    def close(self) -> None:
        self.scan.close()


def _type(entry: "os.DirEntry[bytes]") -> int:
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR >> 12
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG >> 12
    return stat.S_IFLNK >> 12 if entry.is_symlink() else 0


class Tree:
    """The nodes and handles of one mount.

    Attributes:
        answers: by opcode, the function of (node, message) that gives the body of the reply or raises OSError. READ is
            not among them: see `available` and `read`.
    """

    def __init__(
        self, source: str, *, attr_timeout: float, attributes: Callable[[bytes, os.stat_result], bytes]
    ) -> None:
        """
        Args:
            attributes: makes the packed attributes of a path out of what lstat(2) said.
        """
        self._source = os.fsencode(os.path.join(os.path.realpath(source), ""))
        self._ttl = attr_timeout
        self._attributes = attributes
        self._nodes: dict[int, _Node] = {abi.FUSE_ROOT_ID: _Node(b"", os.stat(source).st_ino)}
        self._ids: dict[tuple[bytes, int], int] = {}
        self._handles: dict[int, _File | _Listing] = {}
        self._last_node = abi.FUSE_ROOT_ID
        self._last_handle = 0
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            abi.FUSE_LOOKUP: self._lookup,
            abi.FUSE_GETATTR: self._getattr,
            abi.FUSE_READLINK: lambda node, message: os.readlink(self._full(node)),
            abi.FUSE_OPEN: self._open,
            abi.FUSE_OPENDIR: self._opendir,
            abi.FUSE_READDIR: self._readdir,
            abi.FUSE_STATFS: lambda node, message: abi.pack_statfs(os.statvfs(self._source)),
            abi.FUSE_LSEEK: self._lseek,
            abi.FUSE_GETXATTR: self._getxattr,
            abi.FUSE_LISTXATTR: self._listxattr,
        }

    def path(self, opcode: int, node: int, message: bytes) -> bytes:
        """The path, relative to the source, that a message is about; for LOOKUP that of the name."""
        path = self._node(node).path
        if opcode != abi.FUSE_LOOKUP:
            return path
        name = abi.unpack_name(message)
        return path + b"/" + name if path else name

    def _node(self, node: int) -> _Node:
        try:
            return self._nodes[node]
        except KeyError:
            raise OSError(errno.ESTALE, "unknown node") from None

    def _full(self, node: int) -> bytes:
        return self._source + self._node(node).path

    def _lookup(self, parent: int, message: bytes) -> bytes:
        path = self.path(abi.FUSE_LOOKUP, parent, message)
        st = os.lstat(self._source + path)
        key = (path, st.st_ino)
        node = self._ids.get(key)
        if node is None:
            self._last_node = node = self._last_node + 1
            self._ids[key] = node
            self._nodes[node] = _Node(path, st.st_ino)
        self._nodes[node].lookups += 1
        return abi.pack_entry(node, self._attributes(path, st), self._ttl, self._ttl)

    def forget(self, node: int, count: int) -> None:
        """The kernel gives back `count` references."""
        known = self._nodes.get(node)
        if known is None or node == abi.FUSE_ROOT_ID:
            return
        known.lookups -= count
        if known.lookups <= 0:
            del self._nodes[node], self._ids[known.path, known.ino]

    def _getattr(self, node: int, message: bytes) -> bytes:
        known = self._node(node)
        # Even an fstat comes without a handle.
        st = os.fstat(known.fds[0]) if known.fds else os.lstat(self._source + known.path)
        _check(known, st)
        return abi.pack_attr(self._attributes(known.path, st), self._ttl)

    def _open(self, node: int, message: bytes) -> bytes:
        known = self._node(node)
        fd = os.open(self._source + known.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(known, os.fstat(fd))
        except OSError:
            os.close(fd)
            raise
        known.fds.append(fd)
        return abi.OPEN_OUT.pack(self._add(_File(known, fd)), abi.FOPEN_DIRECT_IO, 0)

    def _opendir(self, node: int, message: bytes) -> bytes:
        return abi.OPEN_OUT.pack(self._add(_Listing(self._full(node))), 0, 0)

    def _add(self, handle: "_File | _Listing") -> int:
        self._last_handle += 1
        self._handles[self._last_handle] = handle
        return self._last_handle

    def release(self, fh: int) -> None:
        """Close a file or a folder."""
        handle = self._handles.pop(fh, None)
        if handle is not None:
            handle.close()

    def _fd(self, fh: int) -> int:
        handle = self._handles.get(fh)
        if not isinstance(handle, _File):
            raise OSError(errno.EBADF, "no such file handle")
        return handle.fd

    def available(self, fh: int, offset: int, size: int) -> int:
        """Bytes there are of the `size` asked for at `offset`."""
        return max(0, min(size, os.fstat(self._fd(fh)).st_size - offset))

    def read(self, fh: int, offset: int, view: memoryview) -> int:
        """Read into `view`; less than all of it only at end of file."""
        fd = self._fd(fh)
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def _readdir(self, node: int, message: bytes) -> bytes:
        fh, offset, room, *_ = abi.READ_IN.unpack_from(message, abi.BODY)
        listing = self._handles.get(fh)
        if not isinstance(listing, _Listing):
            raise OSError(errno.EBADF, "no such folder handle")
        if offset == 0:
            listing.rewind()
        records = []
        for index, (ino, kind, name) in enumerate(listing.since(offset), offset + 1):
            room -= abi.dirent_size(name)
            if room < 0:
                break
            records.append(abi.pack_dirent(ino, index, kind, name))
        return b"".join(records)

    def _lseek(self, node: int, message: bytes) -> bytes:
        fh, offset, whence, _ = abi.LSEEK_IN.unpack_from(message, abi.BODY)
        return abi.LSEEK_OUT.pack(os.lseek(self._fd(fh), offset, whence))

    def _getxattr(self, node: int, message: bytes) -> bytes:
        name = abi.unpack_name(message, abi.BODY + abi.GETXATTR_IN.size)
        return sized(message, os.getxattr(self._full(node), name, follow_symlinks=False))

    def _listxattr(self, node: int, message: bytes) -> bytes:
        names = os.listxattr(self._full(node), follow_symlinks=False)
        return sized(message, b"".join(os.fsencode(name) + b"\0" for name in names))

    def close(self) -> None:
        """Close all handles."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()


def _check(node: _Node, st: os.stat_result) -> None:
    if st.st_ino != node.ino:
        raise OSError(errno.ESTALE, "another file has taken this path")


def sized(message: bytes, value: bytes) -> bytes:
    """The answer to GETXATTR and LISTXATTR: the value, or its size if that was asked for. Raises OSError ERANGE."""
    room, _ = abi.GETXATTR_IN.unpack_from(message, abi.BODY)
    if room == 0:
        return abi.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > room:
        raise OSError(errno.ERANGE, "value too long")
    return value
