"""The kernel's FUSE protocol (include/uapi/linux/fuse.h, 7.31 to 7.45) as far as a read-only file system needs it.

Structures, opcodes and flags under the kernel's names, in this machine's byte order. No I/O, no state, no policy: the
session is kernel.py, mounting is mounting.py.

A message from /dev/fuse is `IN_HEADER`, then the operation's body at offset `BODY`. Hand the whole message, cut to the
bytes that were read, to the `unpack_*` functions or to `SOME_IN.unpack_from(message, BODY)`. A reply is `OUT_HEADER`,
then the bytes of a `pack_*` function. Anything truncated or garbled raises `ProtocolError`, which is `struct.error`, so
that the hot structures need no wrapper.
"""

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

ProtocolError = struct.error

FUSE_KERNEL_VERSION: Final = 7
FUSE_KERNEL_MINOR_VERSION: Final = 45
FUSE_ROOT_ID: Final = 1
FUSE_MIN_READ_BUFFER: Final = 8192
"""Bytes a read of /dev/fuse must offer; enough for every message of a mount whose `max_write` is 4096, the least."""

# enum fuse_opcode
FUSE_LOOKUP: Final = 1
FUSE_FORGET: Final = 2
FUSE_GETATTR: Final = 3
FUSE_SETATTR: Final = 4
FUSE_READLINK: Final = 5
FUSE_SYMLINK: Final = 6
FUSE_MKNOD: Final = 8
FUSE_MKDIR: Final = 9
FUSE_UNLINK: Final = 10
FUSE_RMDIR: Final = 11
FUSE_RENAME: Final = 12
FUSE_LINK: Final = 13
FUSE_OPEN: Final = 14
FUSE_READ: Final = 15
FUSE_WRITE: Final = 16
FUSE_STATFS: Final = 17
FUSE_RELEASE: Final = 18
FUSE_FSYNC: Final = 20
FUSE_SETXATTR: Final = 21
FUSE_GETXATTR: Final = 22
FUSE_LISTXATTR: Final = 23
FUSE_REMOVEXATTR: Final = 24
FUSE_FLUSH: Final = 25
FUSE_INIT: Final = 26
FUSE_OPENDIR: Final = 27
FUSE_READDIR: Final = 28
FUSE_RELEASEDIR: Final = 29
FUSE_FSYNCDIR: Final = 30
FUSE_GETLK: Final = 31
FUSE_SETLK: Final = 32
FUSE_SETLKW: Final = 33
FUSE_ACCESS: Final = 34
FUSE_CREATE: Final = 35
FUSE_INTERRUPT: Final = 36
FUSE_BMAP: Final = 37
FUSE_DESTROY: Final = 38
FUSE_IOCTL: Final = 39
FUSE_POLL: Final = 40
FUSE_NOTIFY_REPLY: Final = 41
FUSE_BATCH_FORGET: Final = 42
FUSE_FALLOCATE: Final = 43
FUSE_READDIRPLUS: Final = 44
FUSE_RENAME2: Final = 45
FUSE_LSEEK: Final = 46
FUSE_COPY_FILE_RANGE: Final = 47
FUSE_SETUPMAPPING: Final = 48
FUSE_REMOVEMAPPING: Final = 49
FUSE_SYNCFS: Final = 50
FUSE_TMPFILE: Final = 51
FUSE_STATX: Final = 52
FUSE_COPY_FILE_RANGE_64: Final = 53

OPCODE_NAMES: Final[dict[int, str]] = {
    FUSE_LOOKUP: "LOOKUP",
    FUSE_FORGET: "FORGET",
    FUSE_GETATTR: "GETATTR",
    FUSE_SETATTR: "SETATTR",
    FUSE_READLINK: "READLINK",
    FUSE_SYMLINK: "SYMLINK",
    FUSE_MKNOD: "MKNOD",
    FUSE_MKDIR: "MKDIR",
    FUSE_UNLINK: "UNLINK",
    FUSE_RMDIR: "RMDIR",
    FUSE_RENAME: "RENAME",
    FUSE_LINK: "LINK",
    FUSE_OPEN: "OPEN",
    FUSE_READ: "READ",
    FUSE_WRITE: "WRITE",
    FUSE_STATFS: "STATFS",
    FUSE_RELEASE: "RELEASE",
    FUSE_FSYNC: "FSYNC",
    FUSE_SETXATTR: "SETXATTR",
    FUSE_GETXATTR: "GETXATTR",
    FUSE_LISTXATTR: "LISTXATTR",
    FUSE_REMOVEXATTR: "REMOVEXATTR",
    FUSE_FLUSH: "FLUSH",
    FUSE_INIT: "INIT",
    FUSE_OPENDIR: "OPENDIR",
    FUSE_READDIR: "READDIR",
    FUSE_RELEASEDIR: "RELEASEDIR",
    FUSE_FSYNCDIR: "FSYNCDIR",
    FUSE_GETLK: "GETLK",
    FUSE_SETLK: "SETLK",
    FUSE_SETLKW: "SETLKW",
    FUSE_ACCESS: "ACCESS",
    FUSE_CREATE: "CREATE",
    FUSE_INTERRUPT: "INTERRUPT",
    FUSE_BMAP: "BMAP",
    FUSE_DESTROY: "DESTROY",
    FUSE_IOCTL: "IOCTL",
    FUSE_POLL: "POLL",
    FUSE_NOTIFY_REPLY: "NOTIFY_REPLY",
    FUSE_BATCH_FORGET: "BATCH_FORGET",
    FUSE_FALLOCATE: "FALLOCATE",
    FUSE_READDIRPLUS: "READDIRPLUS",
    FUSE_RENAME2: "RENAME2",
    FUSE_LSEEK: "LSEEK",
    FUSE_COPY_FILE_RANGE: "COPY_FILE_RANGE",
    FUSE_SETUPMAPPING: "SETUPMAPPING",
    FUSE_REMOVEMAPPING: "REMOVEMAPPING",
    FUSE_SYNCFS: "SYNCFS",
    FUSE_TMPFILE: "TMPFILE",
    FUSE_STATX: "STATX",
    FUSE_COPY_FILE_RANGE_64: "COPY_FILE_RANGE_64",
}

MODIFYING: Final[frozenset[int]] = frozenset(
    {
        FUSE_SETATTR,
        FUSE_SYMLINK,
        FUSE_MKNOD,
        FUSE_MKDIR,
        FUSE_UNLINK,
        FUSE_RMDIR,
        FUSE_RENAME,
        FUSE_LINK,
        FUSE_WRITE,
        FUSE_SETXATTR,
        FUSE_REMOVEXATTR,
        FUSE_CREATE,
        FUSE_FALLOCATE,
        FUSE_RENAME2,
        FUSE_COPY_FILE_RANGE,
        FUSE_TMPFILE,
        FUSE_COPY_FILE_RANGE_64,
    }
)
"""Operations that a read-only file system answers with EROFS."""

WITHOUT_REPLY: Final[frozenset[int]] = frozenset({FUSE_FORGET, FUSE_BATCH_FORGET, FUSE_INTERRUPT, FUSE_NOTIFY_REPLY})
"""Messages that must not be answered. (An answer to INTERRUPT would say "not supported" or "ask again".)"""

# INIT flags; bits from 32 on travel in `flags2`, which `unpack_init` and `pack_init_out` fold in and out
FUSE_ASYNC_READ: Final = 1 << 0
FUSE_POSIX_LOCKS: Final = 1 << 1
FUSE_ATOMIC_O_TRUNC: Final = 1 << 3
FUSE_EXPORT_SUPPORT: Final = 1 << 4
FUSE_BIG_WRITES: Final = 1 << 5
FUSE_DONT_MASK: Final = 1 << 6
FUSE_SPLICE_WRITE: Final = 1 << 7
FUSE_SPLICE_MOVE: Final = 1 << 8
FUSE_SPLICE_READ: Final = 1 << 9
FUSE_FLOCK_LOCKS: Final = 1 << 10
FUSE_HAS_IOCTL_DIR: Final = 1 << 11
FUSE_AUTO_INVAL_DATA: Final = 1 << 12
FUSE_DO_READDIRPLUS: Final = 1 << 13
FUSE_READDIRPLUS_AUTO: Final = 1 << 14
FUSE_ASYNC_DIO: Final = 1 << 15
FUSE_WRITEBACK_CACHE: Final = 1 << 16
FUSE_NO_OPEN_SUPPORT: Final = 1 << 17
FUSE_PARALLEL_DIROPS: Final = 1 << 18
FUSE_HANDLE_KILLPRIV: Final = 1 << 19
FUSE_POSIX_ACL: Final = 1 << 20
FUSE_ABORT_ERROR: Final = 1 << 21
FUSE_MAX_PAGES: Final = 1 << 22
FUSE_CACHE_SYMLINKS: Final = 1 << 23
FUSE_NO_OPENDIR_SUPPORT: Final = 1 << 24
FUSE_EXPLICIT_INVAL_DATA: Final = 1 << 25
FUSE_INIT_EXT: Final = 1 << 30
FUSE_HAS_EXPIRE_ONLY: Final = 1 << 35
FUSE_DIRECT_IO_ALLOW_MMAP: Final = 1 << 36
FUSE_PASSTHROUGH: Final = 1 << 37
FUSE_NO_EXPORT_SUPPORT: Final = 1 << 38
FUSE_HAS_RESEND: Final = 1 << 39
FUSE_REQUEST_TIMEOUT: Final = 1 << 42

# open_flags of fuse_open_out
FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_NONSEEKABLE: Final = 1 << 2
FOPEN_CACHE_DIR: Final = 1 << 3
FOPEN_STREAM: Final = 1 << 4
FOPEN_NOFLUSH: Final = 1 << 5
FOPEN_PARALLEL_DIRECT_WRITES: Final = 1 << 6
FOPEN_PASSTHROUGH: Final = 1 << 7

# enum fuse_notify_code: the `error` field of an OUT_HEADER whose `unique` is 0
FUSE_NOTIFY_INVAL_ENTRY: Final = 3
FUSE_NOTIFY_STORE: Final = 4

# ioctl(2) on the connection; _IOW(229, 1, struct fuse_backing_map) and _IOW(229, 2, uint32_t), Linux 6.9
FUSE_DEV_IOC_BACKING_OPEN: Final = 0x4010E501
FUSE_DEV_IOC_BACKING_CLOSE: Final = 0x4004E502

FUSE_GETATTR_FH: Final = 1 << 0
"""In `GETATTR_IN`: the `fh` is valid, this is an fstat."""

# Headers and bodies; the comment names the fields in their order
IN_HEADER: Final = struct.Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
OUT_HEADER: Final = struct.Struct("=IiQ")  # len, error (0 or -errno), unique
BODY: Final = IN_HEADER.size

FORGET_IN: Final = struct.Struct("=Q")  # nlookup
GETATTR_IN: Final = struct.Struct("=IIQ")  # getattr_flags, dummy, fh
OPEN_IN: Final = struct.Struct("=II")  # flags (O_*), open_flags
READ_IN: Final = struct.Struct(
    "=QQIIQII"
)  # fh, offset, size, read_flags, lock_owner, flags (O_*), padding; READDIR(PLUS) too
RELEASE_IN: Final = struct.Struct("=QIIQ")  # fh, flags, release_flags, lock_owner; RELEASEDIR too
FLUSH_IN: Final = struct.Struct("=QIIQ")  # fh, unused, padding, lock_owner
GETXATTR_IN: Final = struct.Struct("=II")  # size, padding; then the name (none for LISTXATTR)
ACCESS_IN: Final = struct.Struct("=II")  # mask, padding
INTERRUPT_IN: Final = struct.Struct("=Q")  # unique of the request that is to end
LSEEK_IN: Final = struct.Struct("=QqII")  # fh, offset, whence, padding

ENTRY_OUT: Final = struct.Struct("=QQQQII88s")  # nodeid, generation, entry_valid, attr_valid, both nsec, fuse_attr
ATTR_OUT: Final = struct.Struct("=QII88s")  # attr_valid, attr_valid_nsec, dummy, fuse_attr
OPEN_OUT: Final = struct.Struct("=QIi")  # fh, open_flags, backing_id (padding before 7.40)
STATFS_OUT: Final = struct.Struct("=QQQQQIII28x")  # blocks, bfree, bavail, files, ffree, bsize, namelen, frsize
GETXATTR_OUT: Final = struct.Struct("=II")  # size, padding: the answer where `size` was 0
LSEEK_OUT: Final = struct.Struct("=Q")  # offset
NOTIFY_STORE_OUT: Final = struct.Struct("=QQII")  # nodeid, offset, size, padding; then the bytes
NOTIFY_INVAL_ENTRY_OUT: Final = struct.Struct("=QII")  # parent, namelen, flags; then the name and a NUL
BACKING_MAP: Final = struct.Struct("=iIQ")  # fd, flags (0), padding
BACKING_ID: Final = struct.Struct("=I")

_INIT_IN = struct.Struct("=IIII")
_INIT_FLAGS2 = struct.Struct("=I")
_INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")
_BATCH_FORGET_IN = struct.Struct("=II")
_FORGET_ONE = struct.Struct("=QQ")
_DIRENT = struct.Struct("=QQII")

NULL_ENTRY: Final = bytes(ENTRY_OUT.size)
"""The entry of a READDIRPLUS record whose attributes are not known: the kernel looks the name up when it needs it."""

_NO_ATTRIBUTES = bytes(88)
_ALIGN = [bytes(-n % 8) for n in range(8)]
_MAX_TTL = 1 << 31  # seconds; longer than any mount, and far from where the kernel's arithmetic would overflow


class InitIn(NamedTuple):
    """The kernel's offer: its protocol version, its readahead in bytes, and all 64 flag bits."""

    major: int
    minor: int
    max_readahead: int
    flags: int


def unpack_init(message: bytes) -> InitIn:
    """The body of INIT, with `flags2` where the kernel sends it (7.36 and later)."""
    major, minor, max_readahead, flags = _INIT_IN.unpack_from(message, BODY)
    if flags & FUSE_INIT_EXT:
        flags |= _INIT_FLAGS2.unpack_from(message, BODY + _INIT_IN.size)[0] << 32
    return InitIn(major, minor, max_readahead, flags)


def pack_init_out(
    *,
    minor: int,
    max_readahead: int,
    flags: int,
    max_background: int,
    congestion_threshold: int,
    max_write: int = 4096,
    max_pages: int = 0,
    max_stack_depth: int = 0,
    request_timeout: int = 0,
    time_gran: int = 1,
    map_alignment: int = 0,
) -> bytes:
    """The answer to INIT.

    Args:
        minor: the smaller of the kernel's and `FUSE_KERNEL_MINOR_VERSION`.
        flags: all 64 bits, a subset of what the kernel offered; FUSE_INIT_EXT is added if one of the upper half is set.
        max_pages: largest READ in pages, with FUSE_MAX_PAGES.
        request_timeout: seconds, with FUSE_REQUEST_TIMEOUT.
        time_gran: nanoseconds.
    """
    if flags >> 32:
        flags |= FUSE_INIT_EXT
    return _INIT_OUT.pack(
        FUSE_KERNEL_VERSION,
        minor,
        max_readahead,
        flags & 0xFFFFFFFF,
        max_background,
        congestion_threshold,
        max_write,
        time_gran,
        max_pages,
        map_alignment,
        flags >> 32,
        max_stack_depth,
        request_timeout,
    )


def pack_error(unique: int, errno: int) -> bytes:
    """A whole reply that is an error (positive `errno`), or success without a body (0)."""
    return OUT_HEADER.pack(16, -errno, unique)


def pack_store(node: int, offset: int, size: int) -> bytes:
    """What comes before the `size` bytes of NOTIFY_STORE, which put them into the page cache of a node."""
    length = OUT_HEADER.size + NOTIFY_STORE_OUT.size + size
    return OUT_HEADER.pack(length, FUSE_NOTIFY_STORE, 0) + NOTIFY_STORE_OUT.pack(node, offset, size, 0)


def pack_inval_entry(parent: int, name: bytes) -> bytes:
    """NOTIFY_INVAL_ENTRY: what the kernel knows of a name in a directory is not to be believed any more."""
    length = OUT_HEADER.size + NOTIFY_INVAL_ENTRY_OUT.size + len(name) + 1
    header = OUT_HEADER.pack(length, FUSE_NOTIFY_INVAL_ENTRY, 0)
    return header + NOTIFY_INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"


def unpack_name(message: bytes, offset: int = BODY) -> bytes:
    """The NUL-terminated name at `offset`: the body of LOOKUP; at `BODY + GETXATTR_IN.size` that of GETXATTR."""
    end = message.find(b"\0", offset)
    if end < 0:
        raise ProtocolError("name without its terminating NUL")
    return message[offset:end]


def unpack_batch_forget(message: bytes) -> Iterator[tuple[int, int]]:
    """The (nodeid, nlookup) pairs of BATCH_FORGET."""
    count, _ = _BATCH_FORGET_IN.unpack_from(message, BODY)
    start = BODY + _BATCH_FORGET_IN.size
    end = start + count * _FORGET_ONE.size
    if end > len(message):
        raise ProtocolError(f"BATCH_FORGET of {count} entries in {len(message)} bytes")
    return _FORGET_ONE.iter_unpack(message[start:end])


def _split(ttl: float) -> tuple[int, int]:
    if ttl <= 0:
        return 0, 0
    if ttl >= _MAX_TTL:
        return _MAX_TTL, 0
    seconds = int(ttl)
    return seconds, int((ttl - seconds) * 1e9)


def pack_entry(node: int, attributes: bytes, entry_ttl: float, attr_ttl: float, generation: int = 0) -> bytes:
    """fuse_entry_out: the answer to a LOOKUP that found `node`.

    Args:
        attributes: `dmfs.types.Attributes`, 88 bytes.
        entry_ttl: seconds for which the kernel may believe the name; negative counts as 0.
        attr_ttl: the same for the attributes.
    """
    entry_sec, entry_nsec = _split(entry_ttl)
    attr_sec, attr_nsec = (entry_sec, entry_nsec) if attr_ttl == entry_ttl else _split(attr_ttl)
    return ENTRY_OUT.pack(node, generation, entry_sec, attr_sec, entry_nsec, attr_nsec, attributes)


def pack_negative_entry(ttl: float) -> bytes:
    """fuse_entry_out of a name that does not exist, to be believed for `ttl` seconds."""
    seconds, nsec = _split(ttl)
    return ENTRY_OUT.pack(0, 0, seconds, 0, nsec, 0, _NO_ATTRIBUTES)


def pack_attr(attributes: bytes, ttl: float) -> bytes:
    """fuse_attr_out: the answer to GETATTR, to be believed for `ttl` seconds."""
    seconds, nsec = _split(ttl)
    return ATTR_OUT.pack(seconds, nsec, 0, attributes)


def pack_statfs(st: os.statvfs_result) -> bytes:
    """fuse_statfs_out: the answer to STATFS."""
    return STATFS_OUT.pack(
        st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree, st.f_bsize, st.f_namemax, st.f_frsize
    )


def dirent_size(name: bytes) -> int:
    """Bytes of `pack_dirent`; in READDIRPLUS add `ENTRY_OUT.size`."""
    return (_DIRENT.size + len(name) + 7) & ~7


def pack_dirent(ino: int, next_offset: int, type: int, name: bytes) -> bytes:
    """One record of READDIR, padded to 8 bytes.

    Args:
        next_offset: what the kernel sends to go on after this record; never 0, which is the beginning.
        type: DT_* of readdir(3).
    """
    length = len(name)
    return _DIRENT.pack(ino, next_offset, length, type) + name + _ALIGN[length & 7]


def pack_direntplus(entry: bytes, ino: int, next_offset: int, type: int, name: bytes) -> bytes:
    """One record of READDIRPLUS. `entry` is `pack_entry(...)`, which counts a look-up of its node, or `NULL_ENTRY`."""
    return entry + pack_dirent(ino, next_offset, type, name)
