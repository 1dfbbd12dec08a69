"""Access to the source directory: the only module that touches it. Read-only, by path below one directory descriptor.

The plain functions block and are called in threads; the coroutines run them there. An OSError of the source passes
through with its own errno. Nothing here caches metadata or retries: that is decided above. Each call is counted by the
thread that makes it, so that none is missed whose caller was cancelled, or which failed half-way.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable

from dmfs.errors import StaleFile
from dmfs.metrics import Metrics
from dmfs.tiers.descriptors import LRU, Descriptor, SourceDescriptor, kept_open
from dmfs.tiers.pending import Pending
from dmfs.tiers.threads import CallThreads
from dmfs.types import Attributes, Clock, DataFile, DirEntry, FileKey, VersionFrom, pack_attributes, unpack_attributes

LISTING_BATCH = 1024  # entries handed over at once while a directory is being read

# A path that was right when it was looked up and now leads elsewhere: the caller's picture is old, the source is well.
MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Source:
    """The dataset directory.

    Attributes:
        path: the absolute path of the directory.
        metadata, data: the threads for each kind of call; `waiting()` of both is what `dmfs status` shows.
        newest_ctime_ns: the newest ctime seen on any file, in nanoseconds: how far the source's own clock has come at
            least.
    """

    def __init__(
        self,
        path: str,
        *,
        metrics: Metrics,
        clock: Clock,
        metadata_threads: int,
        data_threads: int,
        version_from: VersionFrom = "ctime",
    ) -> None:
        self.path = path
        self.metadata = CallThreads(metadata_threads, clock)
        self.data = CallThreads(data_threads, clock)
        self.newest_ctime_ns = 0
        self._metrics = metrics
        self._counting = threading.Lock()
        self._opening: dict[FileKey, Pending] = {}
        self._version_from = version_from
        self._root = Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._descriptors: LRU[FileKey, Descriptor] = LRU(kept_open())
        self._noatime = os.O_NOATIME

    # ---- metadata

    async def lstat(self, path: bytes) -> Attributes:
        """Attributes of a path, links not followed. Raises OSError of the source."""
        (result,) = await self.lstat_many([path])
        if isinstance(result, OSError):
            raise result
        return result

    async def lstat_many(self, paths: list[bytes]) -> list[Attributes | OSError]:
        """Attributes of several paths, or why there are none, one after the other in one thread."""
        results: list[Attributes | OSError] = []
        for result in await self.metadata.run(paths[0], self._lstat_all, paths):
            if isinstance(result, OSError):
                results.append(result)
            else:
                self.newest_ctime_ns = max(self.newest_ctime_ns, result.st_ctime_ns)
                results.append(pack_attributes(result))
        return results

    def _lstat_all(self, paths: list[bytes]) -> list[os.stat_result | OSError]:
        results: list[os.stat_result | OSError] = []
        for path in paths:
            try:
                results.append(self._stat(path))
            except OSError as exc:
                results.append(exc.with_traceback(None))  # which would hold this frame, hence `results`
        return results

    def _stat(self, path: bytes) -> os.stat_result:
        with self._counting:
            self._metrics.source.stats += 1
        return os.stat(path or b".", dir_fd=self._root.fd, follow_symlinks=False)

    async def readlink(self, path: bytes) -> bytes:
        """The target of a symbolic link, as stored. Raises OSError."""
        return await self.metadata.run(path, self._readlink, path)

    def _readlink(self, path: bytes) -> bytes:
        return os.readlink(path, dir_fd=self._root.fd)

    async def statvfs(self) -> os.statvfs_result:
        """The file system's numbers. Raises OSError."""
        return await self.metadata.run(b"", self._statvfs)

    def _statvfs(self) -> os.statvfs_result:
        return os.fstatvfs(self._root.fd)

    async def list_directory(
        self, path: bytes, on_start: Callable[[Attributes], None], on_entries: Callable[[list[DirEntry]], None]
    ) -> None:
        """Read a directory once, without a stat per entry. "." and ".." are left out.

        Args:
            on_start: called first, with the attributes the directory had before it was read.
            on_entries: called in the event loop with each batch, in the order of the source, as they come.
        """
        last_batch = await self.metadata.run(path, self._list_directory, path, on_start, on_entries)
        on_entries(last_batch)

    def _list_directory(
        self, path: bytes, on_start: Callable[[Attributes], None], on_entries: Callable[[list[DirEntry]], None]
    ) -> list[DirEntry]:
        with self._counting:
            self._metrics.source.listings += 1
        directory = Descriptor(self._open_beneath(path, os.O_DIRECTORY))
        attributes = pack_attributes(os.fstat(directory.fd))
        self.metadata.soon(on_start, attributes)
        batch: list[DirEntry] = []
        # By way of /proc, since scandir gives names as bytes only for a path of bytes.
        with os.scandir(b"/proc/self/fd/%d" % directory.fd) as entries:
            for entry in entries:
                batch.append(DirEntry(entry.name, entry.inode(), _entry_type(entry)))
                if len(batch) == LISTING_BATCH:
                    self.metadata.soon(on_entries, batch)
                    batch = []
        return batch

    # ---- file contents

    async def open(self, file: DataFile) -> Descriptor:
        """Open a file, check that it is the version meant, and keep the descriptor for the reads to come.

        Simultaneous callers open it once.

        Raises:
            StaleFile: it is another version, or gone.
            OSError: the source's own.
        """
        while True:
            descriptor = self._descriptors.get(file.key)
            if descriptor is not None:
                return descriptor
            running = self._opening.get(file.key)
            if running is None:
                break
            await running.wait()  # who opens it may be cancelled: then the next one tries
        opening = self._opening[file.key] = Pending()
        try:
            descriptor = await self.data.run(file.path, self.open_file, file)
        except Exception as exc:
            opening.fail(exc)
            raise
        else:
            self.keep(file.key, descriptor)
            return descriptor
        finally:
            del self._opening[file.key]
            opening.finish()

    def keep(self, key: FileKey, descriptor: Descriptor) -> None:
        """Keep a descriptor from `open_file` for the reads to come."""
        self._descriptors.add(key, descriptor)

    def kept(self, key: FileKey) -> Descriptor | None:
        """The kept descriptor of a file, if there is one."""
        return self._descriptors.get(key)

    def close(self, key: FileKey) -> None:
        """Nobody reads this file from the source any more: let its descriptor go."""
        self._descriptors.drop(key)

    def open_file(self, file: DataFile) -> Descriptor:
        """Open a file and check its version. Blocks. Raises StaleFile and OSError."""
        try:
            descriptor = SourceDescriptor(self._open_beneath(file.path, 0))
        except OSError as exc:
            if exc.errno in MOVED:
                raise StaleFile(f"{os.fsdecode(file.path)} is gone from the source") from exc
            raise
        with self._counting:
            self._metrics.source.opens += 1
        self.check_version(descriptor, file)
        return descriptor

    def is_version(self, attributes: Attributes, file: DataFile) -> bool:
        """True if attributes of a path are those of the version meant."""
        st = unpack_attributes(attributes)
        if not st.is_regular or st.size != file.version.size or st.mtime_ns != file.version.mtime_ns:
            return False
        return self._version_from == "mtime" or st.ctime_ns == file.version.ctime_ns

    def check_version(self, descriptor: Descriptor, file: DataFile) -> bool:
        """Raise StaleFile unless the open file still has the bytes of the version meant. Blocks.

        Returns:
            True if it is that version to the last time stamp. False if only its ctime differs because it was unlinked
            or replaced by rename while it was open: it keeps its bytes, readers go on as they would natively, but
            there is nobody left to publish it for.
        """
        st = self._fstat(descriptor)
        if st.st_size == file.version.size and st.st_mtime_ns == file.version.mtime_ns and stat.S_ISREG(st.st_mode):
            if st.st_ctime_ns == file.version.ctime_ns or self._version_from == "mtime":
                return True
            if st.st_nlink == 0:
                return False
        raise StaleFile(f"{os.fsdecode(file.path)} has changed at the source")

    def read_into(self, descriptor: Descriptor, file: DataFile, offset: int, view: memoryview) -> bool:
        """Fill `view` with the bytes at `offset`, and check afterwards that they are of the version meant. Blocks.

        Returns:
            What `check_version` said.

        Raises:
            StaleFile: the file ended early or changed meanwhile; nothing in `view` may be used.
            OSError: the source's own.
        """
        done = calls = 0
        try:
            while done < len(view):
                calls += 1
                count = self._read_some(descriptor, view[done:] if done else view, offset + done)
                if count == 0:
                    raise StaleFile(f"{os.fsdecode(file.path)} has become shorter at the source")
                done += count
        finally:
            with self._counting:
                self._metrics.source.reads += calls
                self._metrics.source.bytes += done
        return self.check_version(descriptor, file)

    def _read_some(self, descriptor: Descriptor, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor.fd, [view], offset)

    def _fstat(self, descriptor: Descriptor) -> os.stat_result:
        return os.fstat(descriptor.fd)

    async def seek(self, file: DataFile, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE on the source's file. Raises StaleFile and OSError."""
        descriptor = await self.open(file)
        return await self.data.run(file.path, os.lseek, descriptor.fd, offset, whence)

    def _open_beneath(self, path: bytes, flags: int) -> int:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path or b".", flags | self._noatime, dir_fd=self._root.fd)
        except PermissionError as exc:
            # Only a file's owner may ask for no atime. One such refusal is taken for the whole source, or every open
            # would cost two.
            if exc.errno != errno.EPERM or not self._noatime:
                raise
            self._noatime = 0
            return os.open(path or b".", flags, dir_fd=self._root.fd)


def _entry_type(entry: "os.DirEntry[bytes]") -> int:
    """The DT_* value of a directory entry; 0 for the rarer kinds, which the reader then finds out by stat."""
    if entry.is_file(follow_symlinks=False):
        return 8  # DT_REG
    if entry.is_dir(follow_symlinks=False):
        return 4  # DT_DIR
    if entry.is_symlink():
        return 10  # DT_LNK
    return 0  # DT_UNKNOWN
