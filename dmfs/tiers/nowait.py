"""What a tier can do without waiting for a disk, found by trying it once.

A hit is served inside the event loop, which must not sleep because one disk does. Two kernel features make that
possible on a disk: openat2(2) with RESOLVE_CACHED (Linux 5.12) opens only what needs no I/O to look up, and
preadv2(2) with RWF_NOWAIT reads only what is in the page cache. Memory file systems know neither and need neither.
"""

import ctypes
import errno
import os

_SYS_OPENAT2 = 437  # the same number on every architecture, as all system calls since 5.1
_RESOLVE_CACHED = 0x20  # include/uapi/linux/openat2.h


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW = _OpenHow(os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC | os.O_NOFOLLOW, 0, _RESOLVE_CACHED)
_HOW_POINTER = ctypes.byref(_HOW)
_HOW_SIZE = ctypes.sizeof(_HOW)
_syscall = ctypes.CDLL(None, use_errno=True).syscall


def open_cached(name: str, dir_fd: int) -> int:
    """Open a file of ours for reading if its name is in the kernel's cache.

    Raises:
        BlockingIOError: a disk would have to be asked.
        OSError: anything else, ENOSYS before Linux 5.12 among it.
    """
    fd: int = _syscall(_SYS_OPENAT2, dir_fd, os.fsencode(name), _HOW_POINTER, _HOW_SIZE)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return fd


def can_read_nowait(dir_fd: int) -> bool:
    """True if files in this directory can be read with RWF_NOWAIT.

    Blocks. Raises OSError if it cannot be written to.
    """
    fd = make_unnamed(dir_fd)
    try:
        os.pwrite(fd, b"x", 0)
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True  # known; it would have had to wait just now
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    finally:
        os.close(fd)
    return True


def make_unnamed(dir_fd: int) -> int:
    """A new, empty file in this directory, without a name by the time this returns. Blocks. Raises OSError."""
    name = f"probe-{os.getpid()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        os.unlink(name, dir_fd=dir_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd
