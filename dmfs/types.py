"""Small values that cross the layers: attributes, versions, keys, directory entries, the clock. No behaviour, no I/O.

Names and paths of the file system are bytes everywhere; `str` begins at the command line. Paths are relative to the
source, without a leading slash; the source directory itself is b"".
"""

import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

PIECE_SIZE = 4 * MiB
"""Bytes of a piece, the unit of fetching, of digests and of waiting.

It is also one RPC of a Lustre client with usual settings.
"""

VersionFrom = Literal["ctime", "mtime"]
"""What makes a version: `ctime` is size, mtime and ctime; `mtime` leaves ctime out, where nodes differ in it."""

AskedIo = Literal["auto", "passthrough", "pagecache", "plain"]
"""How bytes are to get to readers; fuse/io_mode.py says what each means."""

Attributes = bytes
"""Attributes of a file in the layout of `struct fuse_attr` (include/uapi/linux/fuse.h since protocol 7.9, 88 bytes).

Packed, because a million of them must fit in memory, and in this layout, because the kernel front end then sends them
as they are.
"""

_ATTR = struct.Struct("=QQQqqqIIIIIIIIII")
ATTRIBUTES_SIZE = _ATTR.size

NANOSECONDS = 1_000_000_000


class Stat(NamedTuple):
    """The fields of `Attributes`, in their order.

    Times are seconds (negative before 1970) plus nanoseconds (never negative).
    """

    ino: int
    size: int
    blocks: int
    atime: int
    mtime: int
    ctime: int
    atime_nsec: int
    mtime_nsec: int
    ctime_nsec: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blksize: int
    flags: int

    @property
    def mtime_ns(self) -> int:
        """Nanoseconds since 1970, as `os.stat_result.st_mtime_ns`."""
        return self.mtime * NANOSECONDS + self.mtime_nsec

    @property
    def ctime_ns(self) -> int:
        """Nanoseconds since 1970, as `os.stat_result.st_ctime_ns`."""
        return self.ctime * NANOSECONDS + self.ctime_nsec

    @property
    def is_regular(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return stat.S_ISDIR(self.mode)


def pack_attributes(st: os.stat_result) -> Attributes:
    """`Attributes` of a stat result.

    divmod rounds towards minus infinity, as struct timespec wants it for times before 1970.
    """
    atime, atime_nsec = divmod(st.st_atime_ns, NANOSECONDS)
    mtime, mtime_nsec = divmod(st.st_mtime_ns, NANOSECONDS)
    ctime, ctime_nsec = divmod(st.st_ctime_ns, NANOSECONDS)
    return _ATTR.pack(
        st.st_ino,
        st.st_size,
        st.st_blocks,
        atime,
        mtime,
        ctime,
        atime_nsec,
        mtime_nsec,
        ctime_nsec,
        st.st_mode,
        st.st_nlink & 0xFFFFFFFF,
        st.st_uid,
        st.st_gid,
        st.st_rdev & 0xFFFFFFFF,  # glibc's encoding of the low 32 bits is the kernel's new_encode_dev
        st.st_blksize & 0xFFFFFFFF,
        0,
    )


def unpack_attributes(attributes: Attributes) -> Stat:
    """The fields of `attributes`."""
    return Stat._make(_ATTR.unpack(attributes))


class FileVersion(NamedTuple):
    """What tells one version of a file's bytes from another: size in bytes, times in nanoseconds."""

    size: int
    mtime_ns: int
    ctime_ns: int


FileKey = bytes
"""16 bytes: 8 that name the file within its dataset, then 8 that name its version."""


class DataFile(NamedTuple):
    """One version of one regular file of the source: where it is, and which bytes are meant."""

    path: bytes
    version: FileVersion
    key: FileKey


def file_key(
    dataset_id: bytes, path: bytes, version: FileVersion, *, shared_ino: int = 0, version_from: VersionFrom = "ctime"
) -> FileKey:
    """The key of one version of a file.

    Args:
        shared_ino: the inode number where the file has several names (st_nlink > 1), so that all of them share one
            copy; else 0.
    """
    name = b"i%d" % shared_ino if shared_ino else b"p" + path
    identity = blake2b(dataset_id + b"\0" + name, digest_size=8).digest()
    ctime_ns = version.ctime_ns if version_from == "ctime" else 0
    return identity + blake2b(b"%d %d %d" % (version.size, version.mtime_ns, ctime_ns), digest_size=8).digest()


class Entry(NamedTuple):
    """The answer to a look-up.

    `node` 0 means that the name does not exist, which may be remembered for `ttl` seconds.
    """

    node: int
    attributes: Attributes
    ttl: float


class DirEntry(NamedTuple):
    """One name of a directory: `type` is the DT_* value of readdir(3), 0 (DT_UNKNOWN) where the source did not say."""

    name: bytes
    ino: int
    type: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks, replaceable in tests. Seconds."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


def hex_key(key: FileKey) -> str:
    """A key as it is written in file names and logs."""
    return key.hex()
