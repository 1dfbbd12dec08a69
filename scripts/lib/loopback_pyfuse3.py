"""A bare read-only loop-back file system with pyfuse3: the plainest Python file system, which dmfs is measured against.

As in the pass-through example of pyfuse3, each request is one system call made inline in the event loop, and the kernel
may keep pages between opens. Not part of dmfs, and not for use: its error handling ends with passing on errnos.

    python loopback_pyfuse3.py SOURCE MOUNTPOINT        (runs until unmounted)
"""

import errno
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Sequence

import pyfuse3
import trio

TIMEOUT = 3600.0  # seconds the kernel may keep names and attributes: longer than any measurement


class Loopback(pyfuse3.Operations):
    """The tree below `source`. Node ids are inode numbers, as in the library's example; so one file system only."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._paths: dict[int, bytes] = {pyfuse3.ROOT_INODE: os.fsencode(source)}
        self._lookups: defaultdict[int, int] = defaultdict(int)

    def _entry(self, st: os.stat_result, node: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size"):
            setattr(entry, name, getattr(st, name))
        for name in ("st_atime_ns", "st_ctime_ns", "st_mtime_ns"):
            setattr(entry, name, getattr(st, name))
        entry.st_ino = node
        entry.st_blksize = st.st_blksize
        entry.st_blocks = st.st_blocks
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = TIMEOUT
        return entry

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        """Attributes by lstat."""
        try:
            return self._entry(os.lstat(self._paths[inode]), inode)
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from None

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        """A name by lstat."""
        path = self._paths[parent_inode] + b"/" + name
        try:
            st = os.lstat(path)
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from None
        self._paths.setdefault(st.st_ino, path)
        self._lookups[st.st_ino] += 1
        return self._entry(st, st.st_ino)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Drop paths that the kernel no longer knows."""
        for inode, count in inode_list:
            self._lookups[inode] -= count
            if not self._lookups[inode]:
                del self._lookups[inode], self._paths[inode]

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """The node id is the handle."""
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Names in inode order, as in the example."""
        folder = self._paths[fh]
        with os.scandir(folder) as entries:
            found = sorted((entry.inode(), entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
        for inode, name, st in found:
            if inode <= start_id:
                continue
            if not pyfuse3.readdir_reply(token, name, self._entry(st, inode), inode):
                break
            self._paths.setdefault(inode, folder + b"/" + name)
            self._lookups[inode] += 1

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """A descriptor of the source's file is the handle."""
        try:
            return pyfuse3.FileInfo(fh=os.open(self._paths[inode], os.O_RDONLY))
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from None

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """One pread."""
        return os.pread(fh, size, off)

    async def release(self, fh: int) -> None:
        """One close."""
        os.close(fh)


def main() -> None:
    """Mount and serve until unmounted."""
    source, mountpoint = sys.argv[1:]
    assert stat.S_ISDIR(os.stat(source).st_mode)
    # "ro" spares a GETATTR after each read; the measure should be the best that a plain file system can be.
    options = (set(pyfuse3.default_options) - {"nonempty"}) | {"fsname=loopback", "ro"}
    pyfuse3.init(Loopback(source), mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
